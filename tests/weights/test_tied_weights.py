"""Which weights of a model are considered shared."""

from __future__ import annotations

import torch
from torch import nn

from hf_rocm.weights.tied_weights import shared


def test_tied_parameters_views_and_overlaps_are_found_by_name():
    flat = torch.randn(64)
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "abcdef"})
    model["b"].weight = model["a"].weight
    model["c"].weight = nn.Parameter(flat[:16].view(4, 4))
    model["d"].weight = nn.Parameter(flat[32:48].view(4, 4))
    model["e"].register_buffer("copy", model["e"].weight.data)
    model["f"].to("meta")
    result = shared(model)
    assert result[id(model["a"].weight)] == "a.weight and b.weight share memory"
    assert result[id(model["c"].weight)] == result[id(model["d"].weight)] == "c.weight and d.weight share memory"
    assert result[id(model["e"].weight)] == result[id(model["e"].copy)] == "e.copy and e.weight share memory"
    assert id(model["f"].weight) not in result


def test_nothing_is_shared_in_an_ordinary_model():
    assert shared(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))) == {}
