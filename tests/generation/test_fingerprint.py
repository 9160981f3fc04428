"""Fingerprints differ if anything that a recorded step depends on differs, and don't keep parts of the model alive."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import hf_rocm
from hf_rocm.generation.fingerprint import fingerprint
from hf_rocm.generation.watch import watches_of
from tests.generation.conftest import make


def fingerprint_of(model):
    result = fingerprint(model, watches_of(model))
    hash(result)
    return result


class Equal:
    """All instances are equal."""

    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 1


class Unhashable:
    __hash__ = None


class Slots:
    """Weak references to its instances are not possible."""

    __slots__ = ()


@pytest.fixture
def model():
    return hf_rocm.prepare(make("llama"), force=True)


def layer(model):
    return model.model.layers[0]


def test_an_unchanged_model_has_the_same_fingerprint(model):
    layer(model).number, layer(model).many, layer(model).function = 1.5, [1, {"a": 2}], len
    before = fingerprint_of(model)
    layer(model).number, layer(model).many = float("1.5"), [1, {"a": 2}]
    assert fingerprint_of(model) == before and hash(fingerprint_of(model)) == hash(before)


@pytest.mark.parametrize("kind", [Equal, Unhashable, Slots, object])
def test_attributes_are_compared_by_identity(kind, model):
    layer(model).attribute = kind()
    before = fingerprint_of(model)
    assert fingerprint_of(model) == before
    old = layer(model).attribute
    layer(model).attribute = kind()
    assert fingerprint_of(model) != before
    layer(model).attribute = old
    assert fingerprint_of(model) == before


def test_a_freed_object_never_equals_a_later_one(model):
    layer(model).attribute = Equal()
    before = fingerprint_of(model)
    for _ in range(20):
        # The next object may get the same address.
        layer(model).attribute = None
        layer(model).attribute = Equal()
        assert fingerprint_of(model) != before


class Wrapped(torch.Tensor):
    """A subclass, whose instances may have state of their own."""


def test_a_freed_tensor_of_a_subclass_never_equals_a_later_one(model):
    data = torch.zeros(4)
    layer(model).attribute = data.as_subclass(Wrapped)
    before = fingerprint_of(model)
    assert fingerprint_of(model) == before
    for _ in range(200):
        # The next tensor may get the same address, and shares the data.
        layer(model).attribute = None
        layer(model).attribute = data.as_subclass(Wrapped)
        assert fingerprint_of(model) != before


def exchange_names(model):
    """Exchange the names of two norms without changing their order."""
    modules, names = layer(model)._modules, {}
    first, second = "input_layernorm", "post_attention_layernorm"
    for name, module in modules.items():
        names[{first: second, second: first}.get(name, name)] = module
    modules.clear()
    modules.update(names)


CHANGES = {
    "the names of two modules": exchange_names,
    "a module": lambda model: setattr(layer(model), "mlp", copy.deepcopy(layer(model).mlp)),
    "a class": lambda model: setattr(layer(model).mlp, "__class__", type("Other", (type(layer(model).mlp),), {})),
    "a weight": lambda model: setattr(layer(model).mlp.up_proj.weight, "data", torch.zeros(1)),
    "a hook": lambda model: layer(model).register_forward_hook(lambda *_: None),
    "the mode": lambda model: layer(model).mlp.train(),
    "an attribute": lambda model: setattr(layer(model).mlp, "extra", 1),
    "a setting": lambda model: setattr(model.config, "extra", 1),
    "a layer's config": lambda model: setattr(layer(model).self_attn, "config", copy.deepcopy(model.config)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_detected(change, model):
    before = fingerprint_of(model)
    change(model)
    assert fingerprint_of(model) != before


def test_an_equal_config_changes_nothing(model):
    """A recording does not depend on the identity of configs, but on which parts have the same one."""
    before = fingerprint_of(model)
    copied = copy.deepcopy(model.config)
    for module in model.modules():
        if "config" in module.__dict__:
            module.config = copied
    assert fingerprint_of(model) == before


def test_a_setting_of_a_layers_own_config_is_detected(model):
    layer(model).self_attn.config = copy.deepcopy(model.config)
    before = fingerprint_of(model)
    layer(model).self_attn.config.extra = 1
    assert fingerprint_of(model) != before


def test_modules_and_weights_are_not_kept_alive():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = fingerprint_of(model)
    references = [weakref.ref(model[0]), weakref.ref(model[0].weight)]
    model[0] = nn.Linear(4, 4)
    gc.collect()
    assert [reference() for reference in references] == [None, None] and fingerprint_of(model) != before
