"""The rows of transformers' loops: which rows are unfinished and, in the sampling loop, the tokens so far.

After the choice of the next tokens, the sampling loop pads rows that have ended, appends the tokens, calls the stopping
criteria, and checks whether any row is unfinished. This takes five to eleven kernels between two recorded steps. Here,
stand-ins represent the values in between, and appending the tokens computes all of them in one kernel
(`ops.append_tokens`). Any other use of a stand-in computes the value with transformers' operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import Tensor

from hf_rocm import ops
from hf_rocm.errors import TierUnavailable
from hf_rocm.generation.host_tokens import Unchanged
from hf_rocm.generation.stand_in import StandIn
from hf_rocm.ops.append_tokens import one_kernel

# Takes the length of the rows. Returns the tokens that end a row of this length, None if no row of this length ends, or
# False if other criteria apply.
Ends = Callable[[int], Tensor | None | Literal[False]]


class Appended(NamedTuple):
    """The result of `ops.append_tokens`. done: whether no row is unfinished, [] bool."""

    ids: Tensor
    unfinished: Tensor
    done: Tensor


class Rows:
    """The rows of one call of the sampling loop.

    ends: a weak reference to a method, so that the criteria, which reference this object, are freed after the call.
    current: the last value of the unfinished rows, [B]; None if it is not a stand-in. appended: the result of the last
    step, until `taken` returns it; None if transformers' operations computed it. step_ids: the tensor from which the
    last step read its tokens, [B, 1], or None.
    """

    def __init__(self, ends: Callable[[], Ends | None]) -> None:
        self._ends = ends
        # The EOS tokens with which `appended` was computed.
        self._used: Unchanged | None = None
        # Whether the kernel serves the rows of this call.
        self._serves: bool | None = None
        self.current: Unfinished | None = None
        self.appended: Appended | None = None
        self.step_ids: Tensor | None = None
        # The tokens so far, the last of which are in `step_ids`.
        self._copied: Unchanged | None = None

    @property
    def active(self) -> bool:
        """Whether the loop receives stand-ins. False once the kernel has refused the rows of this call."""
        return self._serves is not False

    def append(self, ids: Tensor, tokens: Tensor, unfinished: Tensor, pad: Tensor | None) -> Tensor | None:
        """Append the next tokens, [B]. Returns the tokens so far, [B, S + 1]; None if the kernel can't append them.

        Also returns None if criteria other than one `EosTokenCriteria` may end a row.

        unfinished: the unfinished rows before this step, [B]. pad: the padding token, [], or None if the loop does not
        pad rows that have ended.
        """
        method = self._ends()
        ends = False if method is None else method(ids.shape[1] + 1)
        if ends is False:
            return None
        self._used, self._copied = None if ends is None else Unchanged(ends), None
        flat = None if ends is None else ends.reshape(-1)
        if self._serves is None:
            self._serves = one_kernel(ids, tokens, unfinished, flat, pad)
        if not self._serves:
            return None
        step_ids = self.step_ids
        if step_ids is not None and (step_ids.device, step_ids.dtype) != (ids.device, ids.dtype):
            step_ids = None
        try:
            self.appended = Appended(*ops.append_tokens(ids, tokens, unfinished, flat, pad, step_ids))
        except TierUnavailable:
            # A tier was requested, and the EOS tokens have changed to ones that it can't serve.
            return None
        if step_ids is not None:
            self._copied = Unchanged(self.appended.ids)
        return self.appended.ids

    def copied(self, ids: Tensor, step_ids: Tensor) -> bool:
        """Whether `append` has written the last of these tokens, [B, S], to this tensor, [B, 1].

        False if the tokens may have changed since.
        """
        if self._copied is None or self.step_ids is not step_ids:
            return False
        return self._copied.matches(ids) and not ids.is_inference()

    def taken(self, ids: Tensor, ends: Tensor | None) -> Appended | None:
        """Return `appended` if it has these tokens, and clear it. Returns None if other EOS tokens apply now.

        ends: the EOS tokens that apply now. A streamer may have changed them since the tokens were appended.
        """
        appended, self.appended = self.appended, None
        if appended is None or appended.ids is not ids:
            return None
        same = self._used is None if ends is None else self._used is not None and self._used.matches(ends)
        return appended if same else None


class Tokens(StandIn):
    """The next tokens as the loop receives them, [B], before it pads rows that have ended."""

    def __init__(self, rows: Rows, tokens: Tensor) -> None:
        self.rows, self._tokens = rows, tokens

    def tensor(self) -> Tensor:
        return self._tokens

    def __mul__(self, other: Any) -> Any:
        return _Kept(self, other) if type(other) is Unfinished else super().__mul__(other)

    def __getitem__(self, index: Any) -> Any:
        if index != (slice(None), None) or self.rows.current is None:
            return super().__getitem__(index)
        return _Column(self, self, self.rows.current, None)


class _Kept(StandIn):
    """The next tokens of unfinished rows, and 0 for the other rows, [B]."""

    def __init__(self, tokens: Tokens, unfinished: Unfinished) -> None:
        self._tokens, self._unfinished = tokens, unfinished

    def tensor(self) -> Tensor:
        return self._tokens.tensor() * self._unfinished.tensor()

    def __add__(self, other: Any) -> Any:
        if type(other) is _Padding and other.unfinished is self._unfinished:
            return _Padded(self._tokens, self._unfinished, other.pad)
        return super().__add__(other)


class _Padded(StandIn):
    """The next tokens, [B], with the padding token for rows that have ended."""

    def __init__(self, tokens: Tokens, unfinished: Unfinished, pad: Tensor) -> None:
        self._tokens, self._unfinished, self._pad = tokens, unfinished, pad

    def tensor(self) -> Tensor:
        unfinished = self._unfinished.tensor()
        return self._tokens.tensor() * unfinished + self._pad * (1 - unfinished)

    def __getitem__(self, index: Any) -> Any:
        if index != (slice(None), None):
            return super().__getitem__(index)
        return _Column(self, self._tokens, self._unfinished, self._pad)


class _Ended(StandIn):
    """1 for rows that have ended, else 0, [B]."""

    def __init__(self, unfinished: Unfinished) -> None:
        self._unfinished = unfinished

    def tensor(self) -> Tensor:
        return 1 - self._unfinished.tensor()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ in ("mul", "__mul__") and len(args) == 2 and type(args[1]) is cls and not kwargs:
            pad, ended = args
            if isinstance(pad, Tensor) and pad.ndim == 0:
                return _Padding(pad, ended._unfinished)
        return super().__torch_function__(function, types, args, kwargs)


class _Padding(StandIn):
    """The padding token for rows that have ended, and 0 for the other rows, [B]."""

    def __init__(self, pad: Tensor, unfinished: Unfinished) -> None:
        self.pad, self.unfinished = pad, unfinished

    def tensor(self) -> Tensor:
        return self.pad * (1 - self.unfinished.tensor())


class _Column(StandIn):
    """The next tokens, [B, 1]. next_tokens: the same tokens, [B]. The other arguments are those of `Rows.append`."""

    def __init__(self, next_tokens: StandIn, tokens: Tokens, unfinished: Unfinished, pad: Tensor | None) -> None:
        self._next_tokens, self._tokens, self._unfinished, self._pad = next_tokens, tokens, unfinished, pad

    def tensor(self) -> Tensor:
        return self._next_tokens.tensor()[:, None]

    def after(self, ids: Tensor) -> Tensor | None:
        """The tokens so far, [B, S + 1], if one kernel computes them. ids: those before this step, [B, S]."""
        return self._tokens.rows.append(ids, self._tokens.tensor(), self._unfinished.tensor(), self._pad)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ == "cat" and kwargs == {"dim": -1} and len(args) == 1 and len(args[0]) == 2:
            ids, column = args[0]
            result = column.after(ids) if type(column) is cls and isinstance(ids, Tensor) else None
            if result is not None:
                return result
        return super().__torch_function__(function, types, args, kwargs)


class Stopped(StandIn):
    """The rows that the stopping criteria end, [B].

    compute: a function that returns these rows. rows: the rows of the sampling loop, or None in assisted decoding,
    whose single row is unfinished until the loop ends. appended: the result of `ops.append_tokens`, if it appended the
    tokens. none: whether it is known, without computing the rows, that no row ends.
    """

    def __init__(
        self,
        compute: Callable[[], Tensor],
        rows: Rows | None,
        appended: Appended | None = None,
        *,
        none: bool = False,
    ) -> None:
        self.compute, self.rows, self.appended, self.none = compute, rows, appended, none

    def tensor(self) -> Tensor:
        return self.compute()

    def __bool__(self) -> bool:
        return False if self.none else bool(self.tensor())

    def __invert__(self) -> _GoingOn:
        return _GoingOn(self)


class _GoingOn(StandIn):
    """The rows that the stopping criteria do not end, [B]."""

    def __init__(self, stopped: Stopped) -> None:
        self._stopped = stopped

    def tensor(self) -> Tensor:
        return ~self._stopped.tensor()

    def __bool__(self) -> bool:
        return True if self._stopped.none else bool(self.tensor())

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ in ("bitwise_and", "__and__") and len(args) == 2 and type(args[1]) is cls and not kwargs:
            unfinished, going_on = args
            if isinstance(unfinished, Tensor):
                return going_on.among(unfinished)
        return super().__torch_function__(function, types, args, kwargs)

    def among(self, unfinished: Tensor) -> Any:
        """The rows that are unfinished after this step. unfinished: the unfinished rows before it, [B]."""
        stopped = self._stopped
        done = None
        if stopped.appended is not None:
            _, unfinished, done = stopped.appended
        elif not stopped.none:
            unfinished = unfinished & self.tensor()
        result = Unfinished(unfinished, done, one=stopped.rows is None)
        if stopped.rows is not None:
            stopped.rows.current = result
        return result


class Unfinished(StandIn):
    """1 for rows that are unfinished, else 0, [B] int64.

    done: whether no row is unfinished, [] bool, if it was computed. one: whether there is a single row, which is
    unfinished.
    """

    def __init__(self, rows: Tensor, done: Tensor | None, *, one: bool) -> None:
        self._rows, self.done, self.one = rows, done, one

    def tensor(self) -> Tensor:
        return self._rows

    def __and__(self, other: Any) -> Any:
        return other.among(self._rows) if type(other) is _GoingOn else super().__and__(other)

    def __rsub__(self, other: Any) -> Any:
        return _Ended(self) if type(other) is int and other == 1 else super().__rsub__(other)

    def max(self, *args: Any, **kwargs: Any) -> Any:
        return self._rows.max(*args, **kwargs) if args or kwargs else _Largest(self)


class _Largest(StandIn):
    """The largest element of an `Unfinished`, []."""

    def __init__(self, unfinished: Unfinished) -> None:
        self._unfinished = unfinished

    def tensor(self) -> Tensor:
        return self._unfinished.tensor().max()

    def __eq__(self, other: object) -> Any:
        if type(other) is int and other == 0:
            if self._unfinished.one:
                return False
            if self._unfinished.done is not None:
                return self._unfinished.done
        return self.tensor() == other

    __hash__ = StandIn.__hash__
