"""Check one step late whether all sequences have ended, so that the host never waits for the last queued step.

After every step transformers reads a flag on the host: whether all sequences have ended. The host waits for the step,
and the device is idle until the host has queued the next one. One step later the flag has already arrived. The cost is
one extra step if all rows end early. Its tokens are removed, so that the result is the same.

From 5.17 on transformers can do this itself, but does it only on `mps`. In earlier releases its loop calls
`_has_unfinished_sequences`, which `hooks` replaces. The check is deferred only if the extra step has no visible
effect, so it is never deferred with a user's own processors or criteria. If the extra step draws random numbers, the
generator's state from before the step is restored, unless another thread has drawn from the generator in the meantime.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_rocm import patches
from hf_rocm.generation.random_state import default_generator
from hf_rocm.generation.streams import HostCopy
from hf_rocm.patches import Change

# The types of devices that run steps asynchronously.
devices = {"cuda"}

_thread = threading.local()


class DeferredStop:
    """The deferred stop check of one call. undone: the number of steps to remove from the result.

    generator: the generator that the call draws from, or None.
    """

    def __init__(
        self, device: torch.device, length: int, longest: int, generator: torch.Generator | None = None
    ) -> None:
        self._generator = generator
        # the states of the generator before the last two steps and after the last one
        self._states: deque[Tensor] = deque(maxlen=3)
        self._first = self._length = length
        self._steps = -1
        self._longest = longest
        self.flags = [HostCopy((), torch.bool, device) for _ in range(2)]
        self._reads = 0
        self.undone = 0

    def begin_step(self) -> None:
        """Called before every step, and after the last one."""
        self._steps += 1
        if self._generator is not None:
            self._states.append(self._generator.get_state())

    def restore(self, length: int) -> None:
        """Undo the draw of the extra step, if there was one. length: the length of the result, without that step."""
        if self._generator is None or self._first + self._steps == length or len(self._states) < 3:
            return
        before, after = list(self._states)[-2:]
        if torch.equal(self._generator.get_state(), after) and self._draws_alike():
            self._generator.set_state(before)

    def _draws_alike(self) -> bool:
        """Whether the last step drew as many numbers as the step before it, which means that no other thread drew any.

        The state of a GPU's generator counts the numbers drawn. A CPU's does not, but no check is deferred on a CPU.
        """
        if self._generator is None or self._generator.device.type != "cuda":
            return True
        first, second, third = (state.view(torch.int64) for state in self._states)
        return torch.equal(second - first, third - second)

    def continues(self, finished: Tensor) -> bool:
        """Return whether another step follows, from the previous step's flag and the maximum length.

        finished: the flag of the last step, a bool on the device.
        """
        flag, previous = self.flags if self._reads % 2 else self.flags[::-1]
        flag.send(finished)
        self._reads += 1
        self._length += 1
        if self._reads > 1 and bool(previous.read()):
            self.undone = 1
            return False
        return self._length < self._longest


@contextmanager
def stopping_late(input_ids: Tensor, call: Mapping[str, Any]) -> Iterator[DeferredStop | None]:
    """Within the block, defer the stop check of this thread's call to `_sample`, if that has no visible effect.

    input_ids: [B, S]. call: the keyword arguments of `_sample`.
    """
    longest = getattr(call.get("stopping_criteria"), "max_length", None)
    late = None
    if longest is not None and _invisible(input_ids, call):
        sampled = call["generation_config"].do_sample
        generator = default_generator(input_ids.device) if sampled else None
        late = DeferredStop(input_ids.device, input_ids.shape[1], longest, generator)
    check = None if late is None else _stock_check()
    replacements = {} if check is None else {"is_supported": _is_supported, "__init__": _initialiser}
    # A nested call has its own deferred check, or none.
    outer, _thread.late = current(), late
    try:
        with patches.applied(*[Change(check, name, make, key=__name__) for name, make in replacements.items()]):
            yield late
    finally:
        _thread.late = outer


@contextmanager
def stopping_on_time() -> Iterator[None]:
    """Within the block, an outer call's deferred stop check does not apply, for example to a nested `generate`."""
    outer, _thread.late = current(), None
    try:
        yield
    finally:
        _thread.late = outer


def current() -> DeferredStop | None:
    """The deferred stop check of this thread's call, or None."""
    return getattr(_thread, "late", None)


def _invisible(input_ids: Tensor, call: Mapping[str, Any]) -> bool:
    if input_ids.device.type not in devices or call.get("synced_gpus"):
        return False
    if call.get("streamer") is not None and (call["generation_config"].do_sample or not _stock_check()):
        # Streamers may draw random numbers. Before 5.17, a streamer waits for every token anyway.
        return False
    pieces = [*call.get("logits_processor", ()), *call["stopping_criteria"]]
    # A user's processors and criteria may count their calls; transformers' own do not.
    return all(type(piece).__module__.split(".")[0] == "transformers" for piece in pieces)


def _stock_check() -> Any:
    """Return transformers' own class for a deferred stop check (5.17 and later), or None."""
    from transformers.generation import utils

    return getattr(utils, "DeferredStopCheck", None)


def _is_supported(change: Change) -> Any:
    """Replaces `is_supported`, so that transformers' own check is used in the calls that defer it."""

    @functools.wraps(change.owner.is_supported)
    def is_supported(*args: Any, **kwargs: Any) -> bool:
        return (change.live and current() is not None) or bool(change.call_of(change.owner)(*args, **kwargs))

    return staticmethod(is_supported)


def _initialiser(change: Change) -> Callable[..., None]:
    """Replaces `__init__`: a check that this thread's call defers copies its flags on a second stream.

    transformers copies them on the stream of the steps, where the next step starts several microseconds later.
    """

    @functools.wraps(change.owner.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        change.call_of(self)(*args, **kwargs)
        late = current()
        if change.live and late is not None:
            slots = [tuple(slot) for slot in self.slots]
            if len(slots) == len(late.flags) and all(_is_flag(slot[0]) for slot in slots):
                pairs = zip(late.flags, slots, strict=True)
                self.slots = deque((_Flag(copy), *slot[1:]) for copy, slot in pairs)

    return __init__


def _is_flag(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool and value.ndim == 0


class _Flag:
    """Replaces the tensor to which transformers copies a flag, and whose value it reads one step later."""

    def __init__(self, copy: HostCopy) -> None:
        self._copy = copy

    def copy_(self, tensor: Tensor, non_blocking: bool = False) -> _Flag:
        self._copy.send(tensor)
        return self

    def __bool__(self) -> bool:
        return bool(self._copy.read())
