"""The tolerance's constants and rounded runs. Larger constants would weaken numerical tests and first-use checks."""

from __future__ import annotations

import pytest
import torch

from hf_rocm.tolerance import allowed_error
from tests.tolerance import assert_run_as_good_as_eager


@pytest.mark.parametrize(("dtype", "eps"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10), (torch.float32, 2**-23)])
def test_the_tolerance_is_twice_the_eager_error_plus_a_rounding_step_of_the_largest_value(dtype, eps):
    assert allowed_error(0.0, dtype) == eps
    assert allowed_error(0.25, dtype, largest=8.0) == 0.5 + 8 * eps


def test_rounded_runs_are_computed_only_if_the_eager_run_is_not_enough():
    expected = {"a": torch.ones(2, dtype=torch.float64), "b": torch.full((2,), 10.0, dtype=torch.float64)}

    def run(error, dtype=torch.float32):
        return {part: (value * (1 + error)).to(dtype) for part, value in expected.items()}

    computed = []

    def rounded():
        for error in (1e-5, 4e-5):
            computed.append(error)
            yield run(error, torch.float64)

    assert_run_as_good_as_eager(run(1e-6), run(1e-6), expected, rounded=rounded())
    assert computed == []
    assert_run_as_good_as_eager(run(6e-5), run(1e-6), expected, rounded=rounded())
    assert computed == [1e-5, 4e-5]
    with pytest.raises(AssertionError, match="exceeds 8"):
        assert_run_as_good_as_eager(run(1e-4), run(1e-6), expected, rounded=rounded())
