"""An unchanged model is compared with its last snapshot only, and every change since then is detected."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import cache_utils

import hf_rocm
from hf_rocm.generation import decide, fingerprint
from hf_rocm.generation.fingerprint import Snapshot, snapshot_of
from hf_rocm.generation.state import known
from tests.generation.conftest import SAMPLED, counted, generate, make


class Foreign(nn.Module):
    """A user's class."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 0.5


def first(model):
    return model.model.layers[0]


def linear(model):
    return first(model).self_attn.o_proj


@pytest.fixture
def made(monkeypatch):
    """A list with one entry per new snapshot."""
    result = []
    make_snapshot = Snapshot.__init__
    monkeypatch.setattr(Snapshot, "__init__", lambda self, model: (result.append(1), make_snapshot(self, model))[1])
    return result


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3"])
@pytest.mark.parametrize("sampled", [False, True])
def test_calls_of_an_unchanged_model_make_no_snapshot(kind, sampled, pair, made):
    prepared, stock = pair(kind)
    settings = SAMPLED if sampled else {}
    for expected in (1, 0, 0):
        made.clear()
        torch.manual_seed(0)
        tokens = generate(prepared, **settings)
        torch.manual_seed(0)
        assert torch.equal(tokens, generate(stock, **settings)) and len(made) <= expected
    assert counted(prepared)[1]


def moved(model):
    linear(model).weight.data = linear(model).weight.data * 2


def transposed(model):
    linear(model).weight.data = linear(model).weight.data.t()


def replaced_weight(model):
    linear(model).weight = nn.Parameter(linear(model).weight.detach() * 2)


def biased(model):
    linear(model).bias = nn.Parameter(torch.ones(linear(model).out_features))


def moved_buffer(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


def replaced_module(model):
    first(model).mlp = copy.deepcopy(first(model).mlp)


def swapped(model):
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]


def set_attribute(model):
    first(model).input_layernorm.variance_epsilon = 0.5


def set_equal_tensor(model):
    norm = first(model).input_layernorm
    norm.variance_epsilon = torch.tensor(norm.variance_epsilon, dtype=torch.float64)


def added_for_removed(model):
    del linear(model).out_features
    linear(model).further = 1


def added_for_a_note(model):
    model.__dict__.pop("_hf_rocm_report")
    model.further = 1


def set_softcap(model):
    model.config.softcap = 1.0


def nested_setting(model):
    model.config.rope_parameters["rope_theta"] = 99.0


def class_of_config(model):
    cls = type(model.config)
    model.config.__class__ = type(cls.__name__, (cls,), {})


def class_of_module(model):
    cls = type(first(model).mlp)
    first(model).mlp.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__})


def hooked(model):
    linear(model).register_forward_hook(lambda module, args, output: output * 2)


def hooked_before(model):
    linear(model).register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def set_forward(model):
    inner = linear(model).forward
    linear(model).forward = lambda x: inner(x) * 2


def wrapped(model):
    first(model).self_attn.o_proj = Foreign(linear(model))


def trained(model):
    first(model).mlp.train()


def in_place(model):
    first(model).adapters.append("b")


def in_place_of_dict(model):
    first(model).scaling["a"] = 2.0


CHANGES = (
    *(moved, transposed, replaced_weight, biased, moved_buffer, replaced_module, swapped, set_attribute),
    *(set_equal_tensor, added_for_removed, added_for_a_note, set_softcap, nested_setting, class_of_config),
    *(class_of_module, hooked, hooked_before, set_forward, wrapped, trained, in_place, in_place_of_dict),
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_gets_another_snapshot(change):
    model = hf_rocm.prepare(make("llama", num_key_value_heads=4), force=True)
    model.config.rope_parameters = {"rope_theta": 1.0}
    first(model).adapters, first(model).scaling = ["a"], {"a": 1.0}
    before = snapshot_of(model)
    assert snapshot_of(model) is before and Snapshot(model) == before
    change(model)
    after = snapshot_of(model)
    assert after is not before and after != before
    assert snapshot_of(model) is after


def test_only_notes_may_change():
    model = hf_rocm.prepare(make("llama"), force=True)
    before = snapshot_of(model)
    model._hf_rocm_inputs_note = "a note"
    assert snapshot_of(model) == before
    before = snapshot_of(model)
    model._hf_rocm_inputs_note = "another note"
    assert snapshot_of(model) is before


def global_hook():
    return torch_module.register_module_forward_hook(lambda *_: None).remove


def precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if before == "high" else "high")
    return lambda: torch.set_float32_matmul_precision(before)


def without_gradients():
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(not before)
    return lambda: torch.set_grad_enabled(before)


@pytest.mark.parametrize("change", [global_hook, precision, without_gradients])
def test_the_state_of_torch_is_part_of_a_snapshot(change):
    model = hf_rocm.prepare(make("llama"), force=True)
    before = snapshot_of(model)
    undo = change()
    try:
        assert snapshot_of(model) != before
    finally:
        undo()
    assert snapshot_of(model) == before


@pytest.mark.parametrize(
    "change",
    [moved, replaced_weight, biased, moved_buffer, replaced_module, swapped, set_attribute],
)
def test_the_next_call_replays_no_recording_of_the_earlier_state(change, pair, made):
    prepared, stock = pair()
    before = generate(stock)
    for _ in range(2):
        made.clear()
        assert torch.equal(generate(prepared), before)
    assert not made
    recorded = counted(prepared)[0]
    for model in (prepared, stock):
        change(model)
    for _ in range(2):
        assert torch.equal(generate(prepared), generate(stock))
    assert counted(prepared)[0] > recorded and known(prepared).disabled is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "a replay would not run the hook of model.layers.0.self_attn.o_proj"),
        (hooked_before, "a replay would not run the hook of model.layers.0.self_attn.o_proj"),
        (set_forward, "a replay would not run the forward that was set on model.layers.0.self_attn.o_proj"),
        (wrapped, "model.layers.0.self_attn.o_proj is of type Foreign, whose code a replay would not run"),
    ],
)
def test_user_code_is_refused_after_calls_without_it(change, reason, pair, made):
    prepared, stock = pair(graphs=None)
    for _ in range(2):
        made.clear()
        generate(prepared)
    assert not made
    replayed = counted(prepared)[1]
    for model in (prepared, stock):
        change(model)
    assert torch.equal(generate(prepared), generate(stock))
    assert known(prepared).turned_away == {reason: 1} and counted(prepared)[1] == replayed


def test_the_package_of_a_hook_is_not_part_of_a_snapshot_but_is_examined(pair):
    """A hook of a known package is accepted; it may be assigned another `__module__` later."""

    def hook(*_):
        return None

    hook.__module__ = "accelerate.hooks"
    prepared, _ = pair(graphs=None)
    linear(prepared).register_forward_hook(hook)
    for _ in range(2):
        generate(prepared)
    assert not known(prepared).turned_away
    hook.__module__ = "mine"
    generate(prepared)
    assert sum(known(prepared).turned_away.values()) == 1


@pytest.mark.skipif(
    not hasattr(cache_utils, "StaticSlidingWindowLayer"), reason="this release has no layers with windows"
)
def test_windows_follow_replaced_functions_of_caches(pair, monkeypatch):
    """They are computed again only if a function on which they depend was replaced."""
    prepared, _ = pair("mistral")
    snapshot = snapshot_of(prepared)
    before = decide.windows(prepared, snapshot)
    built = []
    compute = decide._windows
    monkeypatch.setattr(decide, "_windows", lambda model: (built.append(1), compute(model))[1])
    assert decide.windows(prepared, snapshot) is before and before == [10, 10] and not built
    other = copy.deepcopy(prepared.config)
    other.num_hidden_layers = 1
    for holder, name in ((cache_utils, "StaticCache"), (type(prepared.config), "get_text_config")):
        with monkeypatch.context() as patch:
            kept = getattr(holder, name)
            changed = (lambda self, **_: other) if name == "get_text_config" else type(name, (kept,), {})
            patch.setattr(holder, name, changed)
            built.clear()
            after = decide.windows(prepared, snapshot)
            assert built and len(after) == (1 if name == "get_text_config" else 2)
    assert decide.windows(prepared, snapshot) == before


def test_a_snapshot_keeps_nothing_alive_that_was_removed():
    model = hf_rocm.prepare(make("llama"), force=True)
    first(model).cached = torch.ones(3)
    snapshot = snapshot_of(model)
    removed = [linear(model), linear(model).weight, first(model).cached, model.model.norm.weight]
    references = [*map(weakref.ref, removed)]
    del removed
    first(model).self_attn.o_proj = nn.Linear(2, 2)
    model.model.norm.weight = nn.Parameter(torch.ones(2))
    first(model).cached = None
    gc.collect()
    assert [reference() for reference in references[1:]] == [None] * 3
    assert not snapshot.holds(model)


def test_restore_drops_the_snapshot():
    model = hf_rocm.prepare(make("llama"), force=True)
    snapshot_of(model)
    hf_rocm.restore(model)
    assert model not in fingerprint._last
