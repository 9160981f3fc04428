"""The modules of an unchanged model are not examined in every call, and every change is detected."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hf_rocm
from hf_rocm.generation import decide, examined, state
from hf_rocm.generation.fingerprint import IGNORED
from hf_rocm.generation.snapshot import Snapshot
from hf_rocm.generation.state import known
from tests.generation.conftest import counted, generate, make
from tests.generation.test_changes import adapted, in_eager, loaded, moved, normalised, replaced
from tests.generation.test_fingerprint import CHANGES, Equal
from tests.generation.test_refused import add_changing_hook, patch_forward, replace_activation


@pytest.fixture
def examinations(monkeypatch):
    """The names of the functions that examine a model's modules, one entry for each time that they run."""
    ran = []
    for module, name in ((decide, "refuses_modules"), (decide, "refuses_device"), (state, "fingerprint")):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, name=name, function=function: ran.append(name) or function(*a))
    return ran


def test_an_unchanged_model_is_examined_twice(pair, examinations):
    prepared, stock = pair()
    for _ in range(2):
        generate(prepared)
    assert {"refuses_modules", "refuses_device", "fingerprint"} == {*examinations}
    assert known(prepared).examined.holds(prepared)
    examinations.clear()
    for new in (5, 12, 20):
        assert torch.equal(generate(prepared, new=new), generate(stock, new=new))
    assert not examinations


@pytest.mark.parametrize("change", [moved, replaced, loaded, adapted, in_eager, normalised])
def test_a_change_takes_effect(change, pair):
    prepared, stock = pair()
    for _ in range(4):
        generate(prepared)
    for model in (prepared, stock):
        change(model)
    expected = generate(stock)
    for _ in range(4):
        assert torch.equal(generate(prepared), expected)


@pytest.mark.parametrize("change", [add_changing_hook, patch_forward, replace_activation])
def test_user_code_is_detected(change, pair):
    prepared, stock = pair(graphs=None)
    for _ in range(4):
        generate(prepared)
    assert known(prepared).examined.holds(prepared)
    before = counted(prepared)[1]
    for model in (prepared, stock):
        change(model)
    for _ in range(3):
        assert torch.equal(generate(prepared), generate(stock))
    assert counted(prepared)[1] == before


@pytest.mark.parametrize("change", [change for name, change in CHANGES.items() if name != "a setting"])
def test_a_snapshot_detects_what_changes_a_fingerprint(change):
    """The config is not part of the modules: it belongs to the surroundings."""
    model = hf_rocm.prepare(make("llama"), force=True)
    saved = Snapshot(model, 0, ignored=IGNORED)
    assert saved.in_place() and saved.unchanged(model)
    change(model)
    assert not (saved.in_place() and saved.unchanged(model))


def test_a_snapshot_detects_another_object_that_equals_the_former_one():
    model = hf_rocm.prepare(make("llama"), force=True)
    layer = model.model.layers[0]
    layer.attribute, layer.many = Equal(), [Equal()]
    saved = Snapshot(model, 0)
    assert saved.unchanged(model)
    for holder, name in ((layer.__dict__, "attribute"), (layer.many, 0)):
        former, holder[name] = holder[name], Equal()
        assert not saved.unchanged(model)
        holder[name] = former
        assert saved.unchanged(model)


def test_ignored_attributes_are_not_compared():
    model = hf_rocm.prepare(make("llama"), force=True)
    saved = Snapshot(model, 0, ignored=IGNORED)
    model.generation_config = copy.deepcopy(model.generation_config)
    model.config.extra = 1
    assert saved.unchanged(model)
    model.model.layers[0].extra = 1
    assert not saved.unchanged(model)


def test_a_model_that_keeps_changing_is_examined_in_every_call(pair, examinations, monkeypatch):
    monkeypatch.setattr(examined, "_MOST_SNAPSHOTS", 2)
    prepared, stock = pair(graphs=None)
    for number in range(4):
        for model in (prepared, stock):
            model.model.norm.variance_epsilon = 1e-5 * (1 + number)
        for _ in range(3):
            assert torch.equal(generate(prepared), generate(stock))
    assert not known(prepared).examined.holds(prepared)
    examinations.clear()
    generate(prepared)
    assert {"refuses_modules", "refuses_device", "fingerprint"} == {*examinations}


def test_with_several_ranks_or_shuffled_copies_the_modules_are_examined(pair, monkeypatch):
    prepared, _ = pair()
    for _ in range(2):
        generate(prepared)
    memo = known(prepared).examined
    assert memo.holds(prepared)
    with monkeypatch.context() as patch:
        patch.setattr(examined.shuffled_copy, "in_use", lambda: True)
        assert not memo.holds(prepared)
    with monkeypatch.context() as patch:
        patch.setattr(examined, "_has_ranks", lambda: True)
        assert not memo.holds(prepared)
    assert memo.holds(prepared)
    known(prepared).start_over()
    assert not memo.holds(prepared)


def test_replaced_weights_are_freed_in_the_next_call(pair):
    prepared, _ = pair()
    for _ in range(3):
        generate(prepared)
    layer = prepared.model.layers[0].mlp.down_proj
    former = layer.weight.untyped_storage()
    pointer = former.data_ptr()
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    generate(prepared)
    snapshot = known(prepared).examined._snapshot
    assert snapshot is None or pointer not in snapshot.pointers


def test_the_runner_takes_the_number_of_the_same_state(pair):
    """Recordings are found again whether a number was noted or computed."""
    prepared, _ = pair()
    for _ in range(4):
        generate(prepared)
    recorded = counted(prepared)[0]
    known(prepared).examined.forget()
    for _ in range(4):
        generate(prepared)
    assert counted(prepared)[0] == recorded
