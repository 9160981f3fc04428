"""transformers' stopping criteria without the tensors that are the same in every step.

The list of criteria fills a tensor with False, each criterion returns another one, and all of them are combined: five
kernels per step for a maximum length alone, although it can't be reached before the last step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from hf_rocm import features
from hf_rocm.generation.token_choice import FEATURE


def of_call(arguments: Mapping[str, Any]) -> StoppingCriteriaList | None:
    """A list that stops at the same steps as the stopping criteria of a call of `_sample`.

    None if there are criteria other than a maximum length and one set of end tokens. arguments: those of `_sample`.
    """
    criteria = arguments.get("stopping_criteria")
    if type(criteria) is not StoppingCriteriaList or features.refuses(FEATURE) is not None:
        return None
    kinds = [type(criterion) for criterion in criteria]
    served = {MaxLengthCriteria, EosTokenCriteria}.issuperset(kinds) and kinds.count(EosTokenCriteria) <= 1
    return _Criteria(criteria) if served else None


class _Criteria(StoppingCriteriaList):
    """A maximum length and at most one set of end tokens."""

    _none: Tensor | None = None  # [B] False

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        end = None
        for criterion in self:
            if type(criterion) is not MaxLengthCriteria:
                end = criterion
            elif _acts(criterion, input_ids.shape[1]):
                return super().__call__(input_ids, scores, **kwargs)
        if end is not None:
            return end(input_ids, scores, **kwargs)
        if self._none is None:
            self._none = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return self._none


def _acts(criterion: MaxLengthCriteria, length: int) -> bool:
    """Whether the criterion stops at this length, or may warn that it exceeds the model's maximum."""
    position = criterion.max_position_embeddings
    return bool(length >= criterion.max_length or (position is not None and length >= position))
