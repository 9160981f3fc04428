"""Budgets in bytes or as shares of the weights, and invalid values."""

from __future__ import annotations

import pytest

from hf_rocm.budget import in_bytes, of_one_pool
from hf_rocm.errors import OptionError


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (0, 0),
        (7, 7),
        (0.25, 250),
        (1.0, 1000),
        ("0", 0),
        ("4GiB", 4 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("512 mb", 512_000_000),
        ("25%", 250),
        ("100 %", 1000),
    ],
)
def test_budgets_are_converted_to_bytes(budget, expected):
    assert in_bytes(budget, 1000) == expected


@pytest.mark.parametrize(
    "budget", [-1, 1.01, float("nan"), True, None, "", "1.5", "110%", "4 parsecs", "-1", "nan%", "9" * 400, [1]]
)
def test_an_invalid_budget_is_refused_with_the_valid_forms(budget):
    with pytest.raises(OptionError, match="is not valid") as caught:
        in_bytes(budget, 1000, source="HF_ROCM_PRESHUFFLE_BUDGET=")
    assert "HF_ROCM_PRESHUFFLE_BUDGET=" in str(caught.value) and "25%" in str(caught.value)


@pytest.mark.parametrize(
    ("gpu", "host", "carved_out", "expected"),
    [
        # Limited by the pages that the driver may map.
        (94, 120, 0.5, 94),
        # Limited by the host's memory and the carve-out.
        (94, 40, 0.5, 40.5),
        # The driver reports only the carve-out.
        (48, 48, 48, 48),
        # The carve-out and all of the host's memory.
        (135, 32, 96, 128),
    ],
)
def test_memory_shared_by_host_and_gpu_is_limited_by_both(gpu, host, carved_out, expected):
    assert of_one_pool(gpu, host, carved_out) == expected
