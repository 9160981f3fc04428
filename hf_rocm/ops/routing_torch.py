"""Choose the experts of every token with PyTorch's own operations; the arguments of `choose_experts`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SOFTMAX, SIGMOID, CHOSEN = "softmax", "sigmoid", "softmax of the chosen"
SCORES = (SOFTMAX, SIGMOID, CHOSEN)


class RoutingSpec(NamedTuple):
    """The specification of a call, from which an implementation is selected.

    experts: E; top: k; weight_dtype: the dtype of the returned weights.
    """

    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    experts: int
    top: int
    scores: str
    biased: bool
    groups: int
    chosen_groups: int
    best: int
    normalise: bool
    grad: bool


class RoutingCall(NamedTuple):
    """One call, see `choose_experts`. dtype: the dtype of the weights."""

    logits: Tensor
    bias: Tensor | None
    top: int
    scores: str
    groups: int
    chosen_groups: int
    best: int
    normalise: bool
    epsilon: float
    scale: float
    dtype: torch.dtype


def stock(call: RoutingCall, *, stable: bool = False) -> tuple[Tensor, Tensor]:
    """The operations of the stock routers. stable: choose by a stable sort instead of `torch.topk`."""
    logits, top = call.logits, call.top
    wide = torch.promote_types(logits.dtype, torch.float32)
    if call.scores == SOFTMAX:
        values = logits.softmax(-1, dtype=wide)
    elif call.scores == SIGMOID:
        values = logits.to(wide).sigmoid()
    else:
        values = logits
    choice = values if call.bias is None else values + call.bias
    if call.groups > 1:
        grouped = choice.unflatten(-1, (call.groups, -1))
        sums = _largest(grouped, call.best, stable)[0].sum(-1)
        kept = torch.zeros_like(sums).scatter(-1, _largest(sums, call.chosen_groups, stable)[1], 1.0)
        choice = grouped.masked_fill(kept.unsqueeze(-1) == 0, -torch.inf).flatten(-2)
    ids = _largest(choice, top, stable)[1]
    weights = values.gather(-1, ids)
    if call.scores == CHOSEN:
        weights = weights.to(wide).softmax(-1)
    if call.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + call.epsilon)
    if call.scale != 1.0:
        weights = weights * call.scale
    return weights.to(call.dtype), ids


def eager(call: RoutingCall) -> tuple[Tensor, Tensor]:
    """The oracle: the same, but the lower of two experts with equal scores is chosen."""
    return stock(call, stable=True)


def _largest(values: Tensor, count: int, stable: bool) -> tuple[Tensor, Tensor]:
    if not stable:
        largest = values.topk(count, dim=-1)
        return largest.values, largest.indices
    ordered, places = values.sort(dim=-1, descending=True, stable=True)
    return ordered[..., :count], places[..., :count]
