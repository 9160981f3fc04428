"""Recorded forwards and prompts do not keep a model alive, and copies of a model start without them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from functools import partial

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module

import hf_rocm
from hf_rocm.forwards.state import known
from hf_rocm.generation.states import FORWARDS
from tests.forwards.conftest import call, counted, equal, logits_of, reasons
from tests.forwards.families import inputs, make
from tests.generation.conftest import make as make_decoder
from tests.generation.conftest import prompt


def recorded(prepared, name="bert", calls=5):
    """Call a prepared model until its forward has been recorded and replayed."""
    for seed in range(calls):
        call(prepared, inputs(name, seed=seed))
    assert counted(prepared)[0] == 1 and counted(prepared)[1]
    return prepared


def by_attribute(model):
    """A layer has an attribute with the model. Setting it the usual way would make the model a child of the layer."""
    last_layer(model).__dict__["owner"] = model


def by_weight(model):
    next(model.parameters()).owner = model


def by_hook(model):
    hook = ModelHook()
    hook.model = model
    add_hook_to_module(last_layer(model), hook)


def by_its_own_attribute(model):
    model.__dict__["owner"] = [model]


def last_layer(model):
    return [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)][-1]


@pytest.mark.parametrize("reference", [by_attribute, by_weight, by_hook, by_its_own_attribute])
def test_a_model_that_references_itself_is_freed(reference, pair):
    prepared, _ = pair()
    reference(prepared)
    recorded(prepared)
    references = weakref.ref(prepared), weakref.ref(known(prepared)), weakref.ref(next(prepared.parameters()))
    del prepared
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_a_model_with_a_hook_of_the_user_is_freed(pair):
    """Its forwards are not recorded, but its attributes are examined."""
    prepared, _ = pair()
    last_layer(prepared).register_forward_hook(partial(ignored, prepared))
    call(prepared, inputs("bert"))
    assert counted(prepared) == (0, 0) and "a replay would not run the hook" in reasons(prepared)[0]
    reference = weakref.ref(prepared)
    del prepared
    gc.collect()
    assert reference() is None


def ignored(*_):
    pass


def test_a_generating_model_that_references_itself_is_freed(decoders):
    prepared, _ = decoders()
    prepared.model.layers[1].__dict__["owner"] = prepared
    for seed in range(5):
        logits_of(prepared, prompt(seed=seed))
    assert counted(prepared)[0] and counted(prepared)[1]
    references = weakref.ref(prepared), weakref.ref(next(prepared.parameters()))
    del prepared
    gc.collect()
    assert [reference() for reference in references] == [None] * 2


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", ["bert", "modernbert", "vit"])
def test_an_ordinary_model_is_freed_without_garbage_collection(name, recorded_on_cpu, no_collection):
    prepared = recorded(hf_rocm.prepare(make(name), force=True), name)
    layer = prepared.get_submodule(next(key for key, _ in prepared.named_modules() if key.endswith("0")))
    references = weakref.ref(prepared), weakref.ref(known(prepared)), weakref.ref(layer)
    del prepared, layer
    assert [reference() for reference in references] == [None] * 3


def test_a_model_whose_prompts_are_recorded_is_freed_without_garbage_collection(recorded_on_cpu, no_collection):
    prepared = hf_rocm.prepare(make_decoder("llama"), force=True)
    for seed in range(5):
        logits_of(prepared, prompt(seed=seed))
    assert counted(prepared)[1]
    references = weakref.ref(prepared), weakref.ref(known(prepared)), weakref.ref(prepared.model.layers[0])
    del prepared
    assert [reference() for reference in references] == [None] * 3


def saved_whole(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model)), saved_whole]
)
def test_a_copy_starts_without_recordings(duplicate, pair):
    prepared, stock = pair()
    recorded(prepared)
    state, counts = known(prepared), counted(prepared)
    twin = duplicate(prepared)
    assert known(twin) is None and known(prepared) is state
    for seed in range(5):
        assert equal(call(twin, inputs("bert", seed=seed)), call(stock, inputs("bert", seed=seed)))
    assert counted(twin)[1] and known(twin) is not state
    assert known(prepared) is state and counted(prepared) == counts
    if duplicate is not copy.copy:
        # A shallow copy has the same modules, which `restore` changes.
        hf_rocm.restore(twin)
        assert not [name for name in twin.__dict__ if name.startswith("_hf_rocm")]
    assert equal(call(prepared, inputs("bert")), call(stock, inputs("bert")))
    assert known(prepared) is state and counted(prepared)[1] == counts[1] + 1


def test_the_state_is_no_part_of_a_checkpoint_or_of_the_description(pair, tmp_path):
    prepared, _ = pair()
    names, modules, text = list(prepared.state_dict()), list(prepared.named_modules()), repr(prepared)
    recorded(prepared)
    assert FORWARDS in prepared.__dict__
    assert list(prepared.state_dict()) == names and list(prepared.named_modules()) == modules
    assert repr(prepared) == text
    prepared.save_pretrained(tmp_path)
    assert not [file.name for file in tmp_path.iterdir() if b"recorded_forwards" in file.read_bytes()]


def test_restore_leaves_the_attributes_of_the_stock_model(recorded_on_cpu):
    model = make("bert")
    before = dict(model.__dict__)
    recorded(hf_rocm.prepare(model, force=True))
    assert before != model.__dict__
    hf_rocm.restore(model)
    assert before == model.__dict__ and known(model) is None
