"""The error measure, the bound derived from it, and the checksums."""

from __future__ import annotations

import math

import pytest
import torch

from hf_rocm.tools.verify import fingerprint
from hf_rocm.tools.verify.fingerprint import checksum, combined, differing
from hf_rocm.tools.verify.measure import Difference, allowed, difference, predictions


def test_the_error_is_relative_to_the_norm_of_its_position():
    expected = torch.tensor([[1000.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    actual = expected + torch.tensor([[10.0, 0.0], [0.0, 0.0], [0.0, 0.5]])
    result = difference(actual, expected)
    assert (result.finite, result.largest, result.worst) == (True, 10.0, 0.5)
    assert result.typical == pytest.approx(0.51 / 3) and result.median == pytest.approx(0.01)


def test_the_error_at_a_zero_position_is_relative_to_the_median():
    expected = torch.tensor([[0.0], [2.0], [4.0]])
    assert difference(expected + 1, expected).worst == 0.5


def test_nonfinite_values_exceed_every_bound():
    broken = difference(torch.tensor([[math.nan]]), torch.ones(1, 1))
    assert not broken.finite and allowed([broken, Difference(True, 9, 9, 9, 9, 9)], torch.float32).exceeded(broken)


def test_the_bound_is_twice_the_largest_error_plus_a_rounding_step():
    bound = allowed([Difference(True, 1, 1, 0.25, 0.1, 0.1), Difference(True, 1, 1, 0.5, 0.05, 0.05)], torch.bfloat16)
    assert (bound.worst, bound.typical) == (1 + 2**-7, 0.2 + 2**-7)
    assert not bound.exceeded(Difference(True, 0, 0, 1.0, 0.2, 0)) and bound.exceeded(Difference(True, 0, 0, 1.1, 0, 0))
    # The error is small, but it is at every position.
    assert bound.exceeded(Difference(True, 0, 0, 0.0, 0.3, 0))


def test_predictions_are_compared_with_a_reference():
    exact = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    result = predictions(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), exact, exact)
    p = math.exp(1) / (1 + math.exp(1))
    assert result.same == 0.5 and result.within_guides == 0.5
    assert result.kl == pytest.approx(((2 * p - 1) * 1.0) / 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_one_changed_element_changes_a_checksum(dtype, monkeypatch):
    # Make the pieces so small that a tensor has several.
    monkeypatch.setattr(fingerprint, "_PIECE", 16)
    values = (torch.arange(50) % 2).to(dtype)
    seen = {checksum(values), checksum(values.view(5, 10)), checksum(values.flip(0))}
    for place in (0, 17, 49):
        other = values.clone()
        other[place] = 1 - int(values[place])
        seen.add(checksum(other))
    assert len(seen) == 6 and checksum(values) == checksum(values.clone())
    assert checksum(torch.empty(0, dtype=dtype)) != checksum(torch.empty(0, 1, dtype=dtype))


def test_entries_with_different_checksums_are_named():
    first, second = {"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}
    assert differing(first, second) == ["b", "c"] and combined(first) != combined(second) == combined(second)
