"""Moves that change nothing keep weight groups and their memory, so recordings that use these groups remain valid."""

from __future__ import annotations

import pytest
import torch

import hf_rocm
from hf_rocm.layers.weight_group import SLOT
from tests.weights import models

MOVES = {
    "the device that it is on": lambda model: model.to("cpu"),
    "the dtype that it has": lambda model: model.to(torch.float32),
    "float": lambda model: model.float(),
}


def groups(model):
    return [module.__dict__[SLOT] for module in model.modules() if not isinstance(module.__dict__.get(SLOT, ()), tuple)]


def addresses(model):
    return [parameter.data_ptr() for parameter in model.parameters()]


@pytest.fixture
def model():
    prepared = hf_rocm.prepare(models.build(), force=True).eval()
    assert groups(prepared)
    return prepared


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_move_that_changes_nothing_keeps_the_groups_and_their_memory(model, move):
    before, old = groups(model), addresses(model)
    assert move(model) is model
    assert all(one is other for one, other in zip(groups(model), before, strict=True))
    assert addresses(model) == old


def test_a_move_to_another_dtype_forms_the_groups_again(model):
    before, old = groups(model), addresses(model)
    model.double()
    assert len(groups(model)) == len(before)
    assert not any(one is other for one, other in zip(groups(model), before, strict=True))
    assert all(one != other for one, other in zip(addresses(model), old, strict=True))


def test_sharing_the_memory_with_other_processes_moves_it_so_no_group_is_kept(model):
    before = groups(model)
    model.share_memory()
    assert all(parameter.is_shared() for parameter in model.parameters())
    assert not any(one is other for one in groups(model) for other in before)
