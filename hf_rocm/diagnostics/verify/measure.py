"""How far two results are apart, and how far they may be.

The measure is relative to each position's own size: in a language model one position's numbers may be a thousand times
another's, and the largest absolute difference would see only that one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

GUIDES = 5e-2  # rtol and atol that porting guides use


@dataclass(frozen=True)
class Difference:
    """Two tensors [N, D] apart. largest, mean: of absolute differences. worst, typical: over the positions, the largest
    and the mean of ‖a − b‖ / ‖b‖, where ‖b‖ is at least the median of all positions; median: the median of that.
    """

    finite: bool
    largest: float
    mean: float
    worst: float
    typical: float
    median: float


@dataclass(frozen=True)
class Allowed:
    """The bounds for `worst` and `typical`."""

    worst: float
    typical: float

    def exceeded(self, found: Difference) -> bool:
        return not found.finite or found.worst > self.worst or found.typical > self.typical


def difference(actual: Tensor, expected: Tensor) -> Difference:
    """actual, expected: [N, D]; compared in float64 on the CPU."""
    finite = bool(torch.isfinite(actual).all())
    off = actual.double().cpu() - expected.double().cpu()
    if not finite or not off.numel():
        empty = math.nan if not finite else 0.0
        return Difference(finite, empty, empty, empty, empty, empty)
    sizes = expected.double().cpu().norm(dim=-1)
    relative = off.norm(dim=-1) / sizes.clamp(min=max(sizes.median().item(), torch.finfo(torch.float64).tiny))
    return Difference(
        True,
        off.abs().max().item(),
        off.abs().mean().item(),
        relative.max().item(),
        relative.mean().item(),
        relative.median().item(),
    )


def allowed(eager: Iterable[Difference], dtype: torch.dtype) -> Allowed:
    """What stock's own run in this dtype gives: twice its worst and its mean error, plus one rounding step each."""
    found = list(eager)
    step = torch.finfo(dtype).eps
    return Allowed(
        2 * max((each.worst for each in found), default=0.0) + step,
        2 * max((each.typical for each in found), default=0.0) + step,
    )


@dataclass(frozen=True)
class Predictions:
    """Logits [N, V] beside those of the reference. kl: mean of KL(reference ‖ these) in nats; same: share of positions
    with the same most likely token. within_guides: share of elements within rtol = atol = 5e-2 of stock's.
    """

    kl: float
    same: float
    within_guides: float


def predictions(logits: Tensor, reference: Tensor, stock: Tensor) -> Predictions:
    """logits, reference, stock: [N, V]."""
    kl, same, within, count = 0.0, 0, 0, 0
    for ours, theirs, plain in zip(logits.split(64), reference.split(64), stock.split(64), strict=True):
        p, q = theirs.double().log_softmax(-1), ours.double().log_softmax(-1)
        kl += (p.exp() * (p - q)).sum().item()
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        within += int(torch.isclose(ours.double(), plain.double(), rtol=GUIDES, atol=GUIDES).sum())
        count += ours.numel()
    n = max(1, len(logits))
    return Predictions(max(0.0, kl / n), same / n, within / max(1, count))
