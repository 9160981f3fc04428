"""The state of a model is compared with and without PyTorch's guards: both comparisons detect the same changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_rocm.generation import snapshot
from hf_rocm.generation.snapshot import Snapshot


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
