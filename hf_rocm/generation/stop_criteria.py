"""transformers' stopping criteria without the tensors that are the same in every step.

The list of criteria fills a tensor with False, each criterion returns another one, and all of them are combined: five
kernels per step for a maximum length alone, although it can't be reached before the last step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from hf_rocm import features
from hf_rocm.generation.host_tokens import HostTokens, Unchanged
from hf_rocm.generation.token_choice import FEATURE, StandIn
from hf_rocm.overlay.dependencies import of_method
from hf_rocm.overlay.replacements import Watch


def instead(arguments: Mapping[str, Any], tokens: HostTokens | None = None) -> dict[str, Any]:
    """Return a replacement for the stopping criteria in the arguments of a loop. It stops at the same steps.

    arguments: the keyword arguments of `_sample`. tokens: with the arguments of `_assisted_decoding`, the tokens of the
    call as far as they are known on the host. Returns the changed argument, or an empty dict if the criteria are not
    replaced.
    """
    criteria = arguments.get("stopping_criteria")
    if type(criteria) is not StoppingCriteriaList or features.refuses(FEATURE) is not None:
        return {}
    return {"stopping_criteria": _Criteria(criteria, tokens)}


class _Criteria(StoppingCriteriaList):
    """Skips the criteria whose result is False, if at most one `EosTokenCriteria` remains."""

    _none: Any = None  # [B] False

    def __init__(self, stock: StoppingCriteriaList, tokens: HostTokens | None) -> None:
        super().__init__(stock)
        self._stock = stock
        self._tokens = tokens
        self._ends: Unchanged | None = None  # the end tokens
        self._set: frozenset[int] = frozenset()  # the same as a set

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        acting = [criterion for criterion in self._stock if _acts(criterion, input_ids.shape[1])]
        if len(acting) > 1 or any(type(criterion) is not EosTokenCriteria for criterion in acting):
            if self._tokens is not None:
                self._tokens.forget()  # a criterion of the user may change the tokens in place
            return self._stock(input_ids, scores, **kwargs)
        if not _skipped().holds():
            return self._stock(input_ids, scores, **kwargs)
        if acting and not self._goes_on(acting[0], input_ids):
            return acting[0](input_ids, scores, **kwargs)
        if self._none is None:
            none = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
            self._none = none if self._tokens is None else _NotDone(none)
        return self._none

    def _goes_on(self, criterion: EosTokenCriteria, input_ids: Tensor) -> bool:
        """Whether the last token is known on the host and is not an end token."""
        last = None if self._tokens is None else self._tokens.last(input_ids)
        if last is None:
            return False
        if self._ends is None or not self._ends.matches(criterion.eos_token_id):
            self._ends = Unchanged(criterion.eos_token_id)
            self._set = frozenset(criterion.eos_token_id.flatten().tolist())
        return last not in self._set


class _NotDone(StandIn):
    """Represents the result of criteria that stop no row, [B] False, and values that the loop derives from it.

    The loop of assisted decoding negates the result, combines it with the unfinished rows (one, which is unfinished
    until the loop ends) and waits for the largest of these. For a result that is known, all of this would be constant.
    """

    def __init__(self, value: Tensor, *, negated: bool = False) -> None:
        self._value, self._negated = value, negated

    def tensor(self) -> Tensor:
        return ~self._value if self._negated else self._value

    def __bool__(self) -> bool:
        return self._negated

    def __invert__(self) -> _NotDone:
        return _NotDone(self._value, negated=not self._negated)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ in ("bitwise_and", "__and__") and len(args) == 2 and type(args[1]) is cls and not kwargs:
            rows, going = args
            if going._negated and len(rows) == 1:
                return _Unfinished(rows)
        return super().__torch_function__(function, types, args, kwargs)


class _Unfinished(StandIn):
    """The unfinished rows of assisted decoding, [1], while the row is unfinished."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def tensor(self) -> Tensor:
        return self._rows

    def __and__(self, other: Any) -> Any:
        return self if type(other) is _NotDone and bool(other) else self._rows & other

    def max(self, *args: Any, **kwargs: Any) -> Any:
        return self._rows.max(*args, **kwargs) if args or kwargs else _One(self._rows)


class _One(StandIn):
    """The largest element of the unfinished rows."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def tensor(self) -> Tensor:
        return self._rows.max()

    def __eq__(self, other: object) -> Any:
        return False if type(other) is int and other == 0 else self.tensor() == other

    __hash__ = StandIn.__hash__


def _acts(criterion: Any, length: int) -> bool:
    """Return whether a criterion may stop at this length, or warn that it exceeds the model's maximum."""
    if type(criterion) is not MaxLengthCriteria:
        return True
    position = criterion.max_position_embeddings
    return bool(length >= criterion.max_length or (position is not None and length >= position))


@cache
def _skipped() -> Watch:
    """The functions that are skipped, with all that they call."""
    kinds = (StoppingCriteriaList, MaxLengthCriteria, EosTokenCriteria)
    return Watch([reference for kind in kinds for reference in of_method(kind, "__call__", called=Tensor)])
