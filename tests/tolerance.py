"""The one tolerance of every numerical test: derived from what the same dtype can do, never chosen.

An implementation may be at most twice as wrong as the eager run in its own dtype, plus one rounding step of the
largest value: a result rounded once cannot be closer than that.
"""

from __future__ import annotations

import torch


def allowed_error(eager: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest absolute error that is allowed, from the error of the same-dtype eager run.

    expected: the float64 reference. The rounding step is eps of eager's dtype at the largest expected magnitude.
    """
    eager_error = (eager.double() - expected).abs().max().item()
    step = torch.finfo(eager.dtype).eps * expected.abs().max().item()
    return 2 * eager_error + step


def assert_as_good_as_eager(actual: torch.Tensor, eager: torch.Tensor, expected: torch.Tensor) -> None:
    """Finite first, then the derived tolerance."""
    assert actual.shape == expected.shape and actual.dtype == eager.dtype
    assert torch.isfinite(actual).all(), "not finite"
    error = (actual.double() - expected).abs().max().item()
    allowed = allowed_error(eager, expected)
    assert error <= allowed, f"error {error:.3g} exceeds {allowed:.3g} (2 x eager + one rounding step)"
