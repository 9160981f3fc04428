"""The one tolerance of every numerical test: derived from what the same dtype can do, never chosen.

An implementation may be at most twice as wrong as the eager run in its own dtype, plus one rounding step of the
largest value: a result rounded once cannot be closer than that. Where sums cancel, as a mean of values of both signs
does, the largest value is one of those that were summed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch

from hf_rocm import tolerance


def allowed_error(eager: torch.Tensor, expected: torch.Tensor, summed: torch.Tensor | None = None) -> float:
    """The largest absolute error that is allowed, from the error of the same-dtype eager run.

    expected: the float64 reference. The rounding step is eps of eager's dtype at the largest expected magnitude, or
    that of what was summed.
    """
    eager_error = (eager.double() - expected).abs().max().item()
    largest = (expected if summed is None else summed).abs().max().item()
    return tolerance.allowed_error(eager_error, eager.dtype, largest)


def assert_as_good_as_eager(
    actual: torch.Tensor, eager: torch.Tensor, expected: torch.Tensor, *, summed: torch.Tensor | None = None
) -> None:
    """Finite first, then the derived tolerance."""
    assert actual.shape == expected.shape and actual.dtype == eager.dtype
    assert torch.isfinite(actual).all(), "not finite"
    error = (actual.double() - expected).abs().max().item()
    allowed = allowed_error(eager, expected, summed)
    assert error <= allowed, f"error {error:.3g} exceeds {allowed:.3g} (2 x eager + one rounding step)"


def assert_run_as_good_as_eager(
    actual: dict[str, torch.Tensor],
    eager: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    *,
    least: float = 0.0,
    rounded: Iterable[dict[str, torch.Tensor]] = (),
) -> None:
    """The same for all that one run gives, judged as a whole: each part is held to the worst part of the eager run.

    Among hundreds of parts some are right by luck in the eager run, on one machine or another, and no other order of
    the same sums would be. Errors are relative to each part's largest value; least: the smallest that one may be, as a
    share of the run's largest. rounded: float64 runs whose weights were rounded once in eager's dtype. They show how
    much a rounding changes, whatever the order, and are made only where the eager run alone would not do.
    """
    assert actual and actual.keys() == eager.keys() == expected.keys()
    floor = least * max(value.abs().max().item() for value in expected.values())
    scales = {part: max(value.abs().max().item(), floor) or 1.0 for part, value in expected.items()}

    def error(of: torch.Tensor, part: str) -> float:
        return (of.double() - expected[part]).abs().max().item() / scales[part]

    for part, value in actual.items():
        assert value.shape == expected[part].shape and value.dtype == eager[part].dtype, part
        assert torch.isfinite(value).all(), f"{part} is not finite"
    errors = {part: error(value, part) for part, value in actual.items()}
    worst, wrong = 0.0, []
    for run in chain([eager], rounded):
        worst = max(worst, *(error(value, part) for part, value in run.items()))
        allowed = {part: tolerance.allowed_error(worst, value.dtype) for part, value in actual.items()}
        wrong = [
            f"{part}: error {errors[part]:.3g} exceeds {allowed[part]:.3g}"
            for part in actual
            if errors[part] > allowed[part]
        ]
        if not wrong:
            return
    raise AssertionError("; ".join(wrong))
