"""Choose the experts of every token with PyTorch's own operations."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_rocm.ops.specs.experts import RoutingCall

SOFTMAX, SIGMOID, CHOSEN = "softmax", "sigmoid", "softmax of the chosen"
SCORES = (SOFTMAX, SIGMOID, CHOSEN)


def stock(call: RoutingCall, *, stable: bool = False) -> tuple[Tensor, Tensor]:
    """The operations of the stock routers. stable: choose by a stable sort instead of `torch.topk`."""
    logits, top_k = call.logits, call.top_k
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
    ids = _largest(choice, top_k, stable)[1]
    weights = values.gather(-1, ids)
    if call.scores == CHOSEN:
        weights = weights.to(wide).softmax(-1)
    if call.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + call.epsilon)
    if call.scale != 1.0:
        weights = weights * call.scale
    return weights.to(call.dtype), ids


def eager(call: RoutingCall) -> tuple[Tensor, Tensor]:
    """The oracle: like `stock`, but among experts with equal scores, the one with the lower index is chosen."""
    return stock(call, stable=True)


def _largest(values: Tensor, count: int, stable: bool) -> tuple[Tensor, Tensor]:
    if not stable:
        largest = values.topk(count, dim=-1)
        return largest.values, largest.indices
    ordered, indices = values.sort(dim=-1, descending=True, stable=True)
    return ordered[..., :count], indices[..., :count]
