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
from hf_rocm.generation.token_choice import FEATURE
from hf_rocm.overlay.dependencies import of_method
from hf_rocm.overlay.replacements import Watch


def of_call(arguments: Mapping[str, Any]) -> StoppingCriteriaList | None:
    """A list that stops at the same steps as the stopping criteria of a call of `_sample`, or None.

    arguments: the keyword arguments of `_sample`.
    """
    criteria = arguments.get("stopping_criteria")
    if type(criteria) is not StoppingCriteriaList or features.refuses(FEATURE) is not None:
        return None
    return _Criteria(criteria)


class _Criteria(StoppingCriteriaList):
    """Skips the criteria whose result is False, if at most one `EosTokenCriteria` remains."""

    _none: Tensor | None = None  # [B] False

    def __init__(self, stock: StoppingCriteriaList) -> None:
        super().__init__(stock)
        self._stock = stock

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        acting = [criterion for criterion in self._stock if _acts(criterion, input_ids.shape[1])]
        if len(acting) > 1 or any(type(criterion) is not EosTokenCriteria for criterion in acting):
            return self._stock(input_ids, scores, **kwargs)
        if not _skipped().holds():
            return self._stock(input_ids, scores, **kwargs)
        if acting:
            return acting[0](input_ids, scores, **kwargs)
        if self._none is None:
            self._none = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return self._none


def _acts(criterion: Any, length: int) -> bool:
    """Return whether a criterion may stop at this length, or warn that it exceeds the model's maximum."""
    if type(criterion) is not MaxLengthCriteria:
        return True
    position = criterion.max_position_embeddings
    return bool(length >= criterion.max_length or (position is not None and length >= position))


@cache
def _skipped() -> Watch:
    """The functions that are skipped, with all that they call."""
    kinds = (StoppingCriteriaList, MaxLengthCriteria)
    return Watch([reference for kind in kinds for reference in of_method(kind, "__call__", called=Tensor)])
