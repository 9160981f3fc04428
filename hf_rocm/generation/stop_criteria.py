"""transformers' stopping criteria without the tensors that are the same in every step.

The list of criteria fills a tensor with False, each criterion returns another tensor, and all of them are combined. For
a maximum length alone, this takes five kernels per step, although the length can't be reached before the last step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal
from weakref import WeakMethod

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from hf_rocm import features
from hf_rocm.generation.host_tokens import HostTokens, Unchanged
from hf_rocm.generation.loop_rows import Rows, Stopped
from hf_rocm.generation.token_choice import FEATURE, Choice
from hf_rocm.overlay.dependencies import of_method
from hf_rocm.overlay.replacements import Watch


def replacement(arguments: Mapping[str, Any], tokens: HostTokens | None = None) -> dict[str, Any]:
    """Return a replacement for the stopping criteria in a loop's arguments. The loop stops at the same steps.

    arguments: the keyword arguments of `_sample` or `_assisted_decoding`. tokens: in assisted decoding, the tokens of
    the call that are known on the host. Returns a dict with the changed argument; empty if the criteria are not
    replaced.
    """
    criteria = arguments.get("stopping_criteria")
    if type(criteria) is not StoppingCriteriaList or features.refuses(FEATURE) is not None:
        return {}
    return {"stopping_criteria": _Criteria(criteria, tokens)}


def of_sampling(arguments: Mapping[str, Any], choice: Choice | None) -> dict[str, Any]:
    """Return replacements for arguments of `_sample`. choice: how the call chooses its tokens, if this is recorded."""
    replaced = replacement(arguments)
    if choice is None:
        return replaced
    if replaced:
        criteria = replaced["stopping_criteria"]
        choice.rows = criteria.rows = Rows(WeakMethod(criteria.ends))
    return {**replaced, "logits_processor": choice.replacement()}


class _Criteria(StoppingCriteriaList):
    """Skips criteria whose result is False. Calls the stock list if criteria other than one `EosTokenCriteria` remain.

    rows: the rows of the sampling loop, if stand-ins may represent them; otherwise None.
    """

    _none: Tensor | None = None  # [B] False

    def __init__(self, stock: StoppingCriteriaList, tokens: HostTokens | None) -> None:
        super().__init__(stock)
        self._stock = stock
        self._tokens = tokens
        self.rows: Rows | None = None
        # The EOS tokens.
        self._ends: Unchanged | None = None
        # The same tokens as a set.
        self._set: frozenset[int] = frozenset()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        rows = self.rows if self.rows is not None and self.rows.active else None
        criterion = self._acting(input_ids.shape[1])
        if rows is not None:
            rows.current = None
            appended = rows.taken(input_ids, criterion.eos_token_id if criterion else None)
            if appended is not None and criterion is not False:
                return Stopped(lambda: self._stock(input_ids, scores, **kwargs), rows, appended)
        if criterion is False:
            if self._tokens is not None and not self._only_reads():
                # A user's criterion may change the tokens in place.
                self._tokens.forget()
            return self._stock(input_ids, scores, **kwargs)
        none = criterion is None or self._goes_on(criterion, input_ids)
        stopped = self._no_row(input_ids) if criterion is None or none else criterion(input_ids, scores, **kwargs)
        if rows is None and (self._tokens is None or not none):
            return stopped
        return Stopped(lambda: stopped, rows, none=none)

    def _acting(self, length: int) -> EosTokenCriteria | None | Literal[False]:
        """The only criterion that may stop a row at this length, if it is an `EosTokenCriteria`; None if there is none.

        False if other criteria may stop a row, or if a function of transformers' criteria was replaced.
        """
        acting = [criterion for criterion in self._stock if _acts(criterion, length)]
        if len(acting) > 1 or any(type(criterion) is not EosTokenCriteria for criterion in acting):
            return False
        if not _skipped().holds():
            return False
        return acting[0] if acting else None

    def _only_reads(self) -> bool:
        """Whether all criteria are transformers' unchanged ones for lengths and EOS tokens, which only read tokens."""
        return all(type(one) in (MaxLengthCriteria, EosTokenCriteria) for one in self._stock) and _skipped().holds()

    def ends(self, length: int) -> Tensor | None | Literal[False]:
        """The EOS tokens that end a row of this length; None if no row ends, False if `_acting` returns False."""
        criterion = self._acting(length)
        return criterion.eos_token_id if isinstance(criterion, EosTokenCriteria) else criterion

    def _no_row(self, input_ids: Tensor) -> Tensor:
        if self._none is None:
            self._none = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return self._none

    def _goes_on(self, criterion: EosTokenCriteria, input_ids: Tensor) -> bool:
        """Whether the last token is known on the host and is not an EOS token."""
        last = None if self._tokens is None else self._tokens.last(input_ids)
        if last is None:
            return False
        if self._ends is None or not self._ends.matches(criterion.eos_token_id):
            self._ends = Unchanged(criterion.eos_token_id)
            self._set = frozenset(criterion.eos_token_id.flatten().tolist())
        return last not in self._set


def _acts(criterion: Any, length: int) -> bool:
    """Return whether, at this length, a criterion may stop a row or warn about the model's maximum length."""
    if type(criterion) is not MaxLengthCriteria:
        return True
    position = criterion.max_position_embeddings
    return bool(length >= criterion.max_length or (position is not None and length >= position))


@cache
def _skipped() -> Watch:
    """Return a watch on the functions that are skipped, and on all functions that they call."""
    kinds = (StoppingCriteriaList, MaxLengthCriteria, EosTokenCriteria)
    return Watch([reference for kind in kinds for reference in of_method(kind, "__call__", called=Tensor)])
