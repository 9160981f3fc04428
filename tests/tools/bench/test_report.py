"""The sentences that report a comparison, and the name of a model with a given number of layers."""

from __future__ import annotations

import pytest
import torch

from hf_rocm.tools.bench import report
from hf_rocm.tools.bench.cases import Case
from hf_rocm.tools.bench.clock import Spread
from hf_rocm.tools.bench.measure import Result, Timing
from hf_rocm.tools.bench.roofline import Floor
from hf_rocm.tools.bench.run import Subject


@pytest.mark.parametrize(
    ("stock", "expected"),
    [
        (Spread(10.0, 9.9, 10.1), ["hf_rocm: 2.00 × as fast as stock"]),
        (Spread(2.5, 2.4, 2.6), ["hf_rocm: takes 2.00 × the time of stock"]),
        (Spread(5.2, 4.9, 5.4), ["hf_rocm: within the noise (the quartiles overlap): 1.04 × as fast as stock"]),
        (
            Spread(10.0, 8.0, 12.0),
            [
                "hf_rocm: 2.00 × as fast as stock, but the times are noisy",
                "noisy: the quartiles of stock span more than 20 % of the median; use more --rounds",
            ],
        ),
    ],
)
def test_a_difference_within_the_noise_is_labelled(stock, expected):
    sides = {"stock": stock, "hf_rocm": Spread(5.0, 4.95, 5.05)}
    timings = tuple(Timing(side, unit, None, 0.1, None, (1.0, 2.0), None) for side, unit in sides.items())
    results = Result(Case("prefill", 1, 8), Floor(4.0, 15e9, 1e10, "memory"), timings, {})
    assert report.comparison(results) == expected


@pytest.mark.parametrize(("layers", "name"), [(None, "small"), (1, "small, 1 layer"), (2, "small, 2 layers")])
def test_the_name_contains_the_number_of_layers(layers, name):
    assert Subject(None, "small", torch.device("cpu"), None, layers).name == name
