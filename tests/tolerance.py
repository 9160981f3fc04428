"""The tolerance of numerical tests, which is derived from the error of the eager run in the same dtype.

The error of an implementation may be at most twice that of the eager run in the same dtype, plus one rounding step of
the largest value, because every result is rounded at least once. If sums cancel, as in a mean of values with both
signs, the largest value is the largest summand.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch

from hf_rocm import tolerance


def allowed_error(eager: torch.Tensor, expected: torch.Tensor, summed: torch.Tensor | None = None) -> float:
    """The largest allowed absolute error, derived from the error of the eager run in the same dtype.

    expected: the float64 reference. summed: the summands. The rounding step is eps of eager's dtype times the largest
    magnitude in `expected`, or in `summed` if given.
    """
    eager_error = (eager.double() - expected).abs().max().item()
    largest = (expected if summed is None else summed).abs().max().item()
    return tolerance.allowed_error(eager_error, eager.dtype, largest)


def assert_as_good_as_eager(
    actual: torch.Tensor, eager: torch.Tensor, expected: torch.Tensor, *, summed: torch.Tensor | None = None
) -> None:
    """Check shape and dtype, and that all values are finite; then apply the derived tolerance."""
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
    """Apply the tolerance to all results of one run, with the largest error of any part of the eager run.

    Among hundreds of parts, some are accurate by chance in the eager run. These parts vary with the machine and
    with the order of the sums. Errors are relative to the largest value of the part.

    least: the minimum of this largest value, as a share of the run's largest value. rounded: float64 results that
    show the effect of rounding independently of the machine: those of runs whose weights or inputs have random relative
    errors of up to half of eps of eager's dtype, or `expected` plus the errors of eager runs with nearby weights. They
    are computed only if an error exceeds the limit derived from the eager run.
    """
    assert actual and actual.keys() == eager.keys() == expected.keys()
    floor = least * max(value.abs().max().item() for value in expected.values())
    scales = {part: max(value.abs().max().item(), floor) or 1.0 for part, value in expected.items()}

    def error(output: torch.Tensor, part: str) -> float:
        return (output.double() - expected[part]).abs().max().item() / scales[part]

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
