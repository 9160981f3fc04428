"""Timed calls of the model's `generate`, and one that returns its logits for the parity check.

`generate` measures the time to the first token with a second, shorter call, not with a logits processor or a streamer:
with either, transformers and hf_rocm choose tokens and check for the end of a call differently than in a user's call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm.tools.bench.cases import Case
from hf_rocm.tools.bench.clock import now, timed
from hf_rocm.tools.bench.variants import Side


class Generated(NamedTuple):
    """The seconds until the first token, per later token on average, and in total.

    For a forward pass, `first` is None, and the other two are the time of the pass.
    """

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
    """Time the greedy generation of exactly `case.new` tokens, and then of the first token alone.

    Both calls have the same maximum length, and the device is idle at the beginning and at the end of each. The time
    per later token is the difference between the two times, divided by the number of later tokens.
    """
    device = ids.device
    whole = timed(lambda: call(side, ids, case.new), device)
    first = timed(lambda: call(side, ids, case.new, stopping_criteria=[_stop]), device)
    # if the shorter call took longer, because the machine paused, the average includes the first token
    later = (whole - first) / (case.new - 1) if case.new > 1 and first < whole else whole / case.new
    return Generated(first, later, whole)


def generate_once(side: Side, ids: Tensor, case: Case) -> Generated:
    """Like `generate`, but with a single call, to time the first call of a process.

    A logits processor records the time of the first token, and changes how the later steps run.
    """
    clock = _FirstLogits(ids.device)
    began = now(ids.device)
    call(side, ids, case.new, logits_processor=[clock])
    ended = now(ids.device)
    assert clock.at is not None
    return Generated(clock.at - began, (ended - clock.at) / max(case.new - 1, 1), ended - began)


def generate_logits(side: Side, ids: Tensor, new: int, *, judged: int) -> tuple[Tensor, Tensor]:
    """Return the sequence [B, S + new], and the fp32 logits [B, J, V] of its first J = min(new, judged) new tokens."""
    keeper = _FirstFewLogits(min(new, judged))
    sequence = call(side, ids, new, logits_processor=[keeper])
    return sequence, torch.stack(keeper.kept, dim=1)


def call(side: Side, ids: Tensor, new: int, **arguments: Any) -> Tensor:
    """Generate greedily with these further arguments, and return the whole sequence."""
    from transformers import LogitsProcessorList, StoppingCriteriaList

    for name, kind in (("logits_processor", LogitsProcessorList), ("stopping_criteria", StoppingCriteriaList)):
        if name in arguments:
            arguments[name] = kind(arguments[name])
    result: Tensor = side.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        **arguments,
        **side.arguments,
    )
    return result


def _stop(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
    """A stopping criterion that ends a call after its first token. input_ids: [B, S]. Returns [B]."""
    return torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
