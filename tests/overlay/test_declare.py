"""Stock classes that are bound by declarations: the arguments of a declaration's forward, and the bound name."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from hf_rocm import overlay
from hf_rocm.overlay import bind


class NewName(nn.Module):
    def forward(self, hidden_states, top_k_index=None):
        return "stock", hidden_states, top_k_index


class OldName(NewName):
    def forward(self, hidden_states, top_k_index=None):
        return "old"


@dataclass(frozen=True)
class Declared:
    fuses: tuple[str, ...] = ("a", "b")

    def forward(self, module: Any, stock: Any, x: Any, ids: Any, fused: Any = None) -> Any:
        return "declared", x, ids, stock(module, x, ids)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(bind, "_bindings", {})
    monkeypatch.setenv("HF_ROCM_FORCE", "1")
    yield
    for cls in (NewName, OldName):
        bind.unbind(cls)
    assert NewName.forward.__qualname__ == "NewName.forward"
    assert not hasattr(NewName.forward, "__hf_rocm_binding__")


@pytest.mark.parametrize("by_name", [(), ("top_k_index",), ("top_k_index", "hidden_states")])
def test_arguments_are_passed_by_stock_name_or_by_position(by_name):
    overlay.binds(NewName, Declared())
    values = {"hidden_states": torch.ones(1), "top_k_index": 3}
    positional = [value for name, value in values.items() if name not in by_name]
    result = NewName()(*positional, **{name: values[name] for name in by_name})
    assert result == ("declared", values["hidden_states"], 3, ("stock", values["hidden_states"], 3))


def test_the_binding_records_its_declaration_and_source():
    overlay.binds(NewName, layer := Declared())
    binding = bind.binding_of(NewName())
    assert binding.layer is layer and binding.fuses == ("a", "b") and binding.takes_fused
    assert binding.home is globals()
    bind.replaces(NewName)(lambda self, stock, x, ids=None: "written")
    assert binding.layer is None and not binding.takes_fused
    assert NewName()(torch.ones(1)) == "written"


def test_the_first_name_that_a_release_has_is_bound():
    module_name = sys.modules[__name__].__name__
    overlay.binds_first(module_name, NewerName=Declared(("c",)), OldName=Declared(), NewName=Declared(("d",)))
    assert {binding.cls for binding in bind.bindings()} == {OldName}
    assert bind.binding_of(OldName()).fuses == ("a", "b")
    with pytest.raises(ImportError, match="OlderName"):
        overlay.binds_first(module_name, OlderName=Declared())
