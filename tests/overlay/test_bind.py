"""The dispatcher on stand-ins for stock classes: the forward that every call runs, and the dispatcher's removal."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import hf_rocm
from hf_rocm.overlay import bind


class Layer(nn.Module):
    def forward(self, x, *, extra: int = 0):
        """The stock docstring."""
        return "stock", extra


class Child(Layer):
    pass


@pytest.fixture
def binding(monkeypatch):
    monkeypatch.setattr(bind, "_bindings", {})
    stock = Layer.forward

    @bind.replaces(Layer, fuses=("a", "b"))
    def dispatcher(self, stock, x, **arguments):
        return "replaced", *stock(self, x, **arguments)

    yield bind._bindings[Layer]
    bind.unbind(Layer)
    assert Layer.forward is stock


def served(layer):
    return layer(torch.ones(1))[0] == "replaced"


def test_an_installed_binding_serves_gpu_inputs_only(binding, monkeypatch):
    assert binding.mode == bind.GPU
    assert not served(Layer())

    class OnGpu:
        is_cuda = True

    assert Layer().forward(OnGpu(), extra=3) == ("replaced", "stock", 3)
    assert Layer().forward(x=OnGpu()) == ("replaced", "stock", 0)
    assert Layer().forward(x=torch.ones(1)) == ("stock", 0)


def test_with_force_every_input_is_served(monkeypatch):
    monkeypatch.setattr(bind, "_bindings", {})
    monkeypatch.setenv("HF_ROCM_FORCE", "1")
    bind.replaces(Layer)(lambda self, stock, x: ("replaced",))
    assert served(Layer())
    bind.unbind(Layer)


def test_an_instances_mode_has_precedence(binding):
    on, off = Layer(), Layer()
    bind.set_mode(on, bind.ON)
    binding.mode = bind.ON
    bind.set_mode(off, bind.OFF)
    assert served(on) and served(Layer()) and not served(off)
    bind.set_mode(off, None)
    assert served(off)
    assert [bind.mode_of(variant) for variant in (on, off, Child())] == [bind.ON, bind.ON, bind.OFF]


def test_a_subclass_keeps_the_stock_forward(binding):
    binding.mode = bind.ON
    assert not served(Child())


def test_copies_and_pickles_keep_the_mode_and_the_state_dict_does_not_contain_it(binding):
    layer = Layer()
    bind.set_mode(layer, bind.ON)
    assert served(copy.deepcopy(layer)) and served(pickle.loads(pickle.dumps(layer)))
    assert layer.state_dict() == {}


def test_signature_and_docstring_equal_stock(binding):
    assert list(inspect.signature(Layer.forward).parameters) == ["self", "x", "extra"]
    assert Layer.forward.__doc__ == "The stock docstring." and Layer.forward.__name__ == "forward"


def test_unbinding_and_binding_again_keeps_one_dispatcher(binding):
    layer = Layer()
    bind.set_mode(layer, bind.ON)
    # transformers and accelerate store the bound method on instances.
    layer.forward = layer.forward
    assert served(layer)
    assert bind.unbind(Layer) is None
    assert not served(layer) and list(bind.bindings()) == []
    bind.replaces(Layer)(lambda self, stock, x: ("replaced", "again"))
    assert served(layer)


def test_unbinding_keeps_another_librarys_patch_and_reports_it(binding):
    dispatcher = Layer.forward
    Layer.forward = lambda self, x: ("wrapped", *dispatcher(self, x))
    binding.mode = bind.ON
    try:
        assert "replaced by other code" in bind.unbind(Layer)
        assert Layer()(torch.ones(1)) == ("wrapped", "stock", 0)
    finally:
        Layer.forward = binding.stock


def test_attached_methods_are_removed_with_the_binding(binding):
    bind.attach(Layer, "_apply", lambda self, function: self)
    assert "_apply" in vars(Layer)
    bind.unbind(Layer)
    assert "_apply" not in vars(Layer)


@pytest.mark.parametrize(
    ("name", "forced", "expected"),
    [
        ("hf_rocm._active.llama", False, True),
        ("transformers.models.llama.modeling_llama", False, False),
        ("transformers.models.llama.modeling_llama", True, True),
        ("my_copy_of_modeling_llama", True, False),
    ],
)
def test_an_overlay_is_wanted_if_it_is_forced_or_activated(name, forced, expected, monkeypatch):
    monkeypatch.setenv("HF_ROCM_FORCE", "1" if forced else "0")
    assert bind.wanted(name) is expected


def test_an_overlay_is_wanted_under_rocm(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert bind.wanted("transformers.models.llama.modeling_llama")


def test_wanted_never_raises(monkeypatch):
    monkeypatch.setenv("HF_ROCM_FORCE", "maybe")
    with pytest.warns(RuntimeWarning, match="HF_ROCM_FORCE=maybe"):
        assert not bind.wanted("transformers.models.llama.modeling_llama")


def test_a_block_of_another_release_is_not_wanted(monkeypatch):
    import transformers.models.llama.modeling_llama as module

    monkeypatch.setenv("HF_ROCM_FORCE", "1")
    monkeypatch.setattr(module, "__hf_rocm_block__", "0.0.1", raising=False)
    with pytest.warns(RuntimeWarning, match=r"written by hf-rocm 0\.0\.1"):
        assert not bind.wanted(module.__name__)
    monkeypatch.setattr(module, "__hf_rocm_block__", hf_rocm.__version__)
    assert bind.wanted(module.__name__)
