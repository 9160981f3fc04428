"""The state of a model is compared with and without PyTorch's guards: both comparisons detect the same changes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_rocm.forwards import snapshot
from hf_rocm.forwards.snapshot import Snapshot
from hf_rocm.generation.states import FORWARDS


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.zeros(2, 3))
        self.register_buffer("number", torch.ones(()))


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "strides": lambda data: data.t(),
    "shape": lambda data: data[:4],
    "another shape of the same size": lambda data: data.view(4, 16),
    "dtype": lambda data: data.view(torch.int32),
}


@pytest.fixture(params=[True, False], ids=["guards", "Python"])
def compared(request, monkeypatch) -> list[str]:
    """A list to which every comparison in Python adds the entry `forms`."""
    ran: list[str] = []
    described = Snapshot._described
    monkeypatch.setattr(Snapshot, "_described", lambda self: (ran.append("forms"), described(self))[1])
    if not request.param:
        monkeypatch.setattr(snapshot, "_guards", None)
    elif snapshot._guards is None:
        pytest.skip("this PyTorch has no such guards")
    return ran


@pytest.mark.parametrize("change", CHANGES)
def test_other_strides_shapes_and_dtypes_at_the_same_address_are_changes(change, compared):
    model = Layer().requires_grad_(False)
    saved = Snapshot(model, 0)
    whole = model.linear.weight.data
    for _ in range(2):
        assert saved.unchanged(model)
        model.linear.weight.data = CHANGES[change](whole)
        assert saved.in_place() and not saved.unchanged(model)
        model.linear.weight.data = whole
    assert saved.unchanged(model)


@torch.no_grad()
def test_guards_replace_the_comparison_in_python(compared):
    """No-grad mode and inference mode have separate guards. If a guard fails, the comparison runs in Python."""
    model = Layer()
    saved = Snapshot(model, 0)
    guards = snapshot._guards is not None
    for inference, expected in ((False, 1), (False, 0), (True, 1), (True, 0), (False, 0), (True, 0)):
        with torch.inference_mode(inference):
            compared.clear()
            assert saved.unchanged(model)
            assert len(compared) == (expected if guards else 1)
    # Guards compare requires_grad, which is not part of the state.
    model.requires_grad_(False)
    for expected in (1, 0):
        compared.clear()
        assert saved.unchanged(model) and len(compared) == (expected if guards else 1)


def test_other_changes_are_detected(compared):
    model: Any = Layer()
    saved = Snapshot(model, 0)
    assert saved.unchanged(model)
    number = model.number
    model.number = torch.ones(())
    assert not saved.unchanged(model)
    model.number = number
    assert saved.unchanged(model)
    model.linear.weight.data = model.linear.weight.data.clone()
    assert not saved.in_place()


class Named:
    """Instances with the same name are equal. Comparing with an object without a name raises an error."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return self.name == other.name  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self.name)


def exchange_layers(model: nn.Module) -> None:
    """Exchange two layers. A `ModuleDict` or `ModuleList` runs its layers in the order of the dict."""
    first = model.layers[0]
    delattr(model.layers, "0")
    model.layers.add_module("0", first)


def replaced(name: str, value: Any) -> Callable[[nn.Module], None]:
    return lambda model: setattr(model, name, value)


@pytest.mark.parametrize(
    "change",
    [
        exchange_layers,
        replaced("named", Named("a")),
        replaced("named", None),
        replaced("many", [Named("a")]),
        replaced("settings", {"config": {"scale": 2.0}}),
        lambda model: model.settings["config"].update(scale=2.0),
        lambda model: model.many.append(Named("b")),
        replaced("pair", [torch.zeros(1, dtype=torch.int32)]),
    ],
)
def test_a_snapshot_detects_the_change(change):
    model = Layer().requires_grad_(False)
    model.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    model.named, model.many, model.pair = Named("a"), [Named("a")], [torch.zeros(1)]
    model.settings = {"config": {"scale": 1.0}}
    saved = Snapshot(model, 0)
    assert saved.unchanged(model)
    change(model)
    assert not saved.unchanged(model)


def test_plain_containers_are_compared_by_value():
    model = Layer().requires_grad_(False)
    model.settings, model.sizes = {"scale": 1.0}, [8, 8]
    saved = Snapshot(model, 0)
    model.settings, model.sizes = {"scale": 1.0}, [8, 8]
    assert saved.unchanged(model)
    model.sizes.append(8)
    assert not saved.unchanged(model)


def test_a_note_is_no_change_but_the_order_of_children_is():
    model = Layer().requires_grad_(False)
    model.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    saved = Snapshot(model, 0)
    model._hf_rocm_stayed = "a reason"
    assert saved.unchanged(model)
    model._hf_rocm_stayed = "another reason"
    exchange_layers(model)
    assert not saved.unchanged(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.__dict__.update(note="new"),
        lambda model: delattr(model, "named"),
        lambda model: model.register_forward_hook(print),
        lambda model: model.register_buffer("number", torch.ones(())),
        lambda model: model._modules.update(linear=model._modules.pop("linear")),
        lambda model: model.eval(),
    ],
)
def test_changes_of_the_model_itself_are_detected(change):
    model = Layer().requires_grad_(False)
    model.named, model.last = Named("a"), nn.Linear(8, 8)
    saved = Snapshot(model, 0)
    assert saved.unchanged(model)
    change(model)
    assert not saved.unchanged(model)


def test_a_model_is_freed_with_the_snapshots_in_its_attributes():
    model = Layer().requires_grad_(False)
    model.named, model.many = Named("a"), [Named("a")]
    saved = Snapshot(model, 0)
    model.__dict__[FORWARDS] = [saved]
    assert saved.unchanged(model)
    references = weakref.ref(model), weakref.ref(saved), weakref.ref(model.linear)
    gc.disable()
    try:
        del model, saved
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()


def test_a_shared_weight_is_compared_once(compared):
    model = Layer().requires_grad_(False)
    model.tied = nn.Linear(8, 8)
    model.tied.weight = model.linear.weight
    saved = Snapshot(model, 0)
    assert sum(tensor is model.linear.weight for tensor in saved.tensors) == 1
    assert saved.unchanged(model)
    compared.clear()
    assert saved.unchanged(model)
    if snapshot._guards is not None:
        assert not compared


def test_only_comparisons_of_values_may_fail(monkeypatch):
    """A defect of hf_rocm itself must not look like a change of the model."""
    model = Layer().requires_grad_(False)
    saved = Snapshot(model, 0)
    monkeypatch.setattr(Snapshot, "_current_forwards", lambda self: self.missing)
    with pytest.raises(AttributeError, match="missing"):
        saved.unchanged(model)
