"""A timed `generate` that adds no GPU work, and one that returns its logits for the parity check."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm.tools.bench.cases import Case
from hf_rocm.tools.bench.clock import now
from hf_rocm.tools.bench.variants import Side


class Generated(NamedTuple):
    """The seconds until the first token, per later token on average, and in total."""

    first: float | None
    later: float
    whole: float


class _FirstLogits:
    """A logits processor that records when the prompt's logits are available, and returns them unchanged."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.at: float | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.at is None:
            self.at = now(self.device)
        return scores


class _FirstFewLogits:
    """A logits processor that copies the logits of the first steps, and returns them unchanged."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.kept: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if len(self.kept) < self.most:
            self.kept.append(scores.clone())
        return scores


def generate(side: Side, ids: Tensor, case: Case) -> Generated:
    """Generate exactly `case.new` tokens greedily. Times run from an idle device to an idle device."""
    clock = _FirstLogits(ids.device)
    began = now(ids.device)
    run_with(side, ids, case.new, clock)
    ended = now(ids.device)
    assert clock.at is not None
    return Generated(clock.at - began, (ended - clock.at) / max(case.new - 1, 1), ended - began)


def generate_logits(side: Side, ids: Tensor, new: int, *, judged: int) -> tuple[Tensor, Tensor]:
    """Return the sequence [B, S + new], and the logits of its first `judged` new tokens, [B, J, V] in fp32."""
    keeper = _FirstFewLogits(min(new, judged))
    sequence = run_with(side, ids, new, keeper)
    return sequence, torch.stack(keeper.kept, dim=1)


def run_with(side: Side, ids: Tensor, new: int, processor: Any) -> Tensor:
    """Generate greedily with one logits processor, and return the whole sequence."""
    from transformers import LogitsProcessorList

    result: Tensor = side.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        logits_processor=LogitsProcessorList([processor]),
        **side.arguments,
    )
    return result
