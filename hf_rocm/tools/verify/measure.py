"""The difference between two results, and its bound.

The difference is relative to the norm at each position. In a language model, the values at one position may be a
thousand times larger than those at another position, and would dominate the largest absolute difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_rocm.tolerance import allowed_error

# The rtol and atol that porting guides use.
GUIDES = 5e-2


@dataclass(frozen=True)
class Difference:
    """The difference between two tensors a and b, [N, D].

    finite: whether a is finite; if not, the other fields are NaN. largest, mean: the maximum and mean of the absolute
    differences. worst, typical, median: the maximum, mean and median over the positions of ‖a − b‖ / ‖b‖, where the
    divisor is at least the median of ‖b‖ over all positions.
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

    def exceeded(self, error: Difference) -> bool:
        return not error.finite or error.worst > self.worst or error.typical > self.typical


def difference(actual: Tensor, expected: Tensor) -> Difference:
    """Compare two tensors in float64 on the CPU. actual, expected: [N, D]."""
    finite = bool(torch.isfinite(actual).all())
    delta = actual.double().cpu() - expected.double().cpu()
    if not finite or not delta.numel():
        empty = math.nan if not finite else 0.0
        return Difference(finite, empty, empty, empty, empty, empty)
    sizes = expected.double().cpu().norm(dim=-1)
    relative = delta.norm(dim=-1) / sizes.clamp(min=max(sizes.median().item(), torch.finfo(torch.float64).tiny))
    return Difference(
        True,
        delta.abs().max().item(),
        delta.abs().mean().item(),
        relative.max().item(),
        relative.mean().item(),
        relative.median().item(),
    )


def allowed(eager: Iterable[Difference], dtype: torch.dtype) -> Allowed:
    """Return the bounds: twice the largest `worst` and twice the largest `typical` of `eager`, plus a rounding
    step each.

    eager: stock's differences in this dtype.
    """
    errors = list(eager)
    return Allowed(
        allowed_error(max((error.worst for error in errors), default=0.0), dtype),
        allowed_error(max((error.typical for error in errors), default=0.0), dtype),
    )


@dataclass(frozen=True)
class Predictions:
    """A comparison of logits [N, V] with those of the reference.

    kl: the mean of KL(reference ‖ logits) in nats. same: the fraction of positions with the same most likely token.
    within_guides: the fraction of elements within rtol = atol = 5e-2 of stock's.
    """

    kl: float
    same: float
    within_guides: float


def predictions(logits: Tensor, reference: Tensor, stock: Tensor) -> Predictions:
    """Compare logits with the reference's and stock's. logits, reference, stock: [N, V]."""
    kl, same, within, count = 0.0, 0, 0, 0
    for actual, expected, plain in zip(logits.split(64), reference.split(64), stock.split(64), strict=True):
        p, q = expected.double().log_softmax(-1), actual.double().log_softmax(-1)
        kl += (p.exp() * (p - q)).sum().item()
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        within += int(torch.isclose(actual.double(), plain.double(), rtol=GUIDES, atol=GUIDES).sum())
        count += actual.numel()
    n = max(1, len(logits))
    return Predictions(max(0.0, kl / n), same / n, within / max(1, count))
