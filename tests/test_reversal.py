"""After any sequence of changes is undone, transformers, torch and accelerate have their original objects."""

from __future__ import annotations

import copy
import gc
import pickle
from contextlib import ExitStack

import pytest
import torch
import transformers
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

import hf_rocm
from hf_rocm.errors import HfRocmError
from hf_rocm.generation import cache_layer, deferred_stop, pool, recorder
from hf_rocm.generation.state import known
from hf_rocm.weights import shuffled_copy
from tests import snapshot
from tests.generation.conftest import _NoEvent, make
from tests.generation.emulator import EmulatedRecorder

KINDS = ("llama", "mixtral", "gemma2")
IDS = torch.tensor([[3, 1, 4, 1, 5]])
NEW = 4

# Attributes that other libraries may patch too: (the owner's name in transformers or torch, the attribute).
WRAPPED = (
    ("LlamaForCausalLM", "generate"),
    ("LlamaForCausalLM", "get_compiled_call"),
    ("LlamaForCausalLM", "prepare_inputs_for_generation"),
    ("LlamaAttention", "forward"),
    ("LlamaMLP", "forward"),
    ("Linear", "forward"),
    ("PreTrainedModel", "from_pretrained"),
)


def owner_of(name):
    from transformers.models.llama import modeling_llama

    return nn.Linear if name == "Linear" else getattr(modeling_llama, name, None) or getattr(transformers, name)


def tokens_of(model):
    return model.generate(IDS, max_new_tokens=NEW, do_sample=False)


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory):
    """Models, their stock tokens, a checkpoint, and a snapshot that is taken after all lazy initialisation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(recorder.factories, "cpu", EmulatedRecorder)
        patch.setattr(cache_layer, "LEAST", 16)
        patch.setattr(pool, "_AHEAD", 32)
        patch.setattr(deferred_stop, "devices", {"cpu"})
        patch.setattr(torch, "Event", _NoEvent)
        World.models = {kind: make(kind) for kind in KINDS}
        World.folder = tmp_path_factory.mktemp("llama")
        World.models["llama"].save_pretrained(World.folder)
        World.expected = {kind: tokens_of(copy.deepcopy(model)) for kind, model in World.models.items()}
        everything_once()
        World.before = snapshot.take()
        yield
        World.before = {}


class World:
    models: dict
    expected: dict
    before: dict


def everything_once():
    for kind, model in World.models.items():
        model = hf_rocm.prepare(copy.deepcopy(model), force=True, linear_backend="auto")
        assert torch.equal(tokens_of(model), World.expected[kind])
        hf_rocm.quantize(model, "int8", keep="cpu", force=True)
        tokens_of(model)
        hf_rocm.restore(hf_rocm.compile(model, force=True, backend="eager"))
    hf_rocm.auto_prepare(force=True)
    transformers.AutoModelForCausalLM.from_pretrained(World.folder)
    hf_rocm.auto_prepare(False)
    with hf_rocm.routed_linear(force=True):
        tokens_of(copy.deepcopy(World.models["llama"]))
    hf_rocm.deactivate()
    del model
    gc.collect()


def changed():
    gc.collect()
    return snapshot.differences(World.before)


def test_the_snapshot_detects_changes_while_a_model_is_prepared():
    """This proves that the other tests can fail."""
    assert sum(len(entries) for _, entries in World.before.values()) > 100_000
    assert not changed() and not list(snapshot.references())
    model = hf_rocm.prepare(copy.deepcopy(World.models["llama"]), force=True)
    kept = (
        shuffled_copy.ShuffledCopy(nn.Linear(64, 32).weight, [nn.Linear(64, 32).weight], 1) if can_shuffle() else None
    )
    hf_rocm.auto_prepare(force=True)
    with hf_rocm.routed_linear(force=True):
        during = set(snapshot.differences(World.before))
    modeling = "transformers.models.llama.modeling_llama."
    assert {
        modeling + "LlamaMLP.forward",
        modeling + "LlamaMLP._apply",
        modeling + "LlamaForCausalLM.generate",
        modeling + "LlamaForCausalLM._sample",
        modeling + "LlamaForCausalLM.get_compiled_call",
        modeling + "LlamaForCausalLM.prepare_inputs_for_generation",
    } <= during
    ends = {name.rpartition(".")[2] for name in during if not name.startswith(modeling)}
    assert {"forward", "from_pretrained"} <= ends
    if transformers.__version__.startswith("4."):
        assert any("_local_mapping" in name for name in during)
    if kept is not None:
        assert any("_global_module_registration_hooks" in name for name in during)
    del kept
    hf_rocm.auto_prepare(False)
    hf_rocm.restore(model)
    hf_rocm.deactivate()
    assert not changed()


def can_shuffle():
    try:
        shuffled_copy.ShuffledCopy(nn.Linear(64, 32).weight, [nn.Linear(64, 32).weight], 1)
    except Exception:  # noqa: BLE001 - the error depends on what this machine lacks
        return False
    return True


def test_transformers_stop_check_is_replaced_only_within_a_call():
    if not hasattr(transformers.generation.utils, "DeferredStopCheck"):
        pytest.skip("this release has no DeferredStopCheck")
    seen = []

    class Observer(transformers.LogitsProcessor):
        __module__ = "transformers.somewhere"

        def __call__(self, ids, scores):
            seen.append({name for name in snapshot.differences(World.before) if "DeferredStopCheck" in name})
            return scores

    model = hf_rocm.prepare(copy.deepcopy(World.models["llama"]), force=True, graphs=True)
    processors = transformers.LogitsProcessorList([Observer()])
    model.generate(IDS, max_new_tokens=2, do_sample=False, logits_processor=processors)
    assert any(any(name.endswith("DeferredStopCheck.is_supported") for name in names) for names in seen)
    hf_rocm.restore(model)
    hf_rocm.deactivate()
    assert not changed()


def test_restoring_one_of_two_models_keeps_the_other_and_its_copies_working():
    one, other = (hf_rocm.prepare(copy.deepcopy(World.models["llama"]), force=True, graphs=True) for _ in range(2))
    hf_rocm.restore(one)
    twin, shallow, unpickled = copy.deepcopy(other), copy.copy(other), pickle.loads(pickle.dumps(other))
    hf_rocm.restore(other)
    for model in (twin, unpickled):
        assert torch.equal(tokens_of(model), World.expected["llama"])
        assert known(model).calls
    for model in (twin, shallow, unpickled):
        assert "generate" in vars(type(model))
        hf_rocm.restore(model)
    assert "generate" not in vars(type(one))
    hf_rocm.deactivate()
    assert not changed()


class Reversal(RuleBasedStateMachine):
    """Prepares, runs, copies, routes, compiles, quantises, patches and restores models in random order."""

    @initialize()
    def start(self):
        self.models, self.wrappers, self.blocks, self.calls = [], [], [], 0

    def entry_at(self, index):
        return self.models[index % len(self.models)]

    @precondition(lambda self: len(self.models) < 3)
    @rule(kind=st.sampled_from(KINDS), prepare=st.booleans())
    def load(self, kind, prepare):
        model = copy.deepcopy(World.models[kind])
        self.models.append([kind, model, True])
        if prepare:
            hf_rocm.prepare(model, force=True)

    @precondition(lambda self: self.models)
    @rule(index=st.integers(0, 5), graphs=st.sampled_from([None, False]), backend=st.sampled_from([None, "auto"]))
    def prepare(self, index, graphs, backend):
        hf_rocm.prepare(self.entry_at(index)[1], force=True, graphs=graphs, linear_backend=backend)

    @precondition(lambda self: self.models)
    @rule(index=st.integers(0, 5))
    def generate(self, index):
        kind, model, exact = self.entry_at(index)
        # Compiling takes seconds and has a separate test.
        if not getattr(model, "_compiled_call_impl", None):
            tokens = tokens_of(model)
            assert not exact or torch.equal(tokens, World.expected[kind])

    @precondition(lambda self: self.models)
    @rule(index=st.integers(0, 5))
    def quantize(self, index):
        entry = self.entry_at(index)
        try:
            hf_rocm.quantize(entry[1], "int8", keep="cpu", force=True)
        except HfRocmError:
            # The model is already quantised.
            return
        entry[2] = False

    @precondition(lambda self: self.models)
    @rule(index=st.integers(0, 5))
    def compile(self, index):
        hf_rocm.compile(self.entry_at(index)[1], force=True, backend="eager")

    @precondition(lambda self: self.models)
    @rule(index=st.integers(0, 5))
    def route(self, index):
        hf_rocm.route_linear(self.entry_at(index)[1], force=True)

    @precondition(lambda self: len(self.models) in (1, 2))
    @rule(index=st.integers(0, 5), duplicate=st.sampled_from([copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]))
    def copy(self, index, duplicate):
        kind, model, exact = self.entry_at(index)
        if not getattr(model, "_compiled_call_impl", None):
            self.models.append([kind, duplicate(model), exact])

    @precondition(lambda self: self.models)
    @rule(index=st.integers(0, 5))
    def restore(self, index):
        entry = self.entry_at(index)
        hf_rocm.restore(entry[1])
        entry[2] = True

    @precondition(lambda self: self.models)
    @rule(index=st.integers(0, 5))
    def drop(self, index):
        self.models.pop(index % len(self.models))
        gc.collect()

    @rule(everywhere=st.booleans())
    def activate(self, everywhere):
        with options_forced():
            hf_rocm.activate("llama", everywhere=everywhere)

    @rule()
    def deactivate(self):
        hf_rocm.deactivate()

    @rule(enabled=st.booleans())
    def auto_prepare(self, enabled):
        hf_rocm.auto_prepare(enabled, force=True)

    @precondition(lambda self: len(self.models) < 3)
    @rule()
    def from_pretrained(self):
        model = transformers.AutoModelForCausalLM.from_pretrained(World.folder)
        self.models.append(["llama", model, True])

    @precondition(lambda self: len(self.blocks) < 2)
    @rule()
    def enter_routed_linear(self):
        block = hf_rocm.routed_linear(force=True)
        block.__enter__()
        self.blocks.append(block)

    @precondition(lambda self: self.blocks)
    @rule(index=st.integers(0, 1))
    def leave_routed_linear(self, index):
        self.blocks.pop(index % len(self.blocks)).__exit__(None, None, None)

    @rule(place=st.sampled_from(WRAPPED))
    def wrap(self, place):
        owner, name = owner_of(place[0]), place[1]
        before = vars(owner).get(name, snapshot.ABSENT)
        is_class_method = isinstance(before, classmethod)
        function = before.__func__ if is_class_method else getattr(owner, name)

        def wrapper(*args, **kwargs):
            self.calls += 1
            return function(*args, **kwargs)

        other = classmethod(wrapper) if is_class_method else wrapper
        setattr(owner, name, other)
        self.wrappers.append((owner, name, before, other))

    @precondition(lambda self: self.wrappers)
    @rule()
    def unwrap(self):
        """Undo the last patch by another library, if it is still the outermost one."""
        owner, name, before, wrapper = self.wrappers[-1]
        if vars(owner).get(name) is wrapper:
            self.wrappers.pop()
            if before is snapshot.ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    @invariant()
    def wrappers_of_other_libraries_work(self):
        for owner, name, _, wrapper in getattr(self, "wrappers", ()):
            if owner is nn.Linear and vars(owner)[name] is wrapper:
                before = self.calls
                nn.Linear(2, 2)(torch.ones(1, 2))
                assert self.calls > before

    def teardown(self):
        if not hasattr(self, "models"):
            return
        with ExitStack() as stack:
            for block in self.blocks:
                stack.push(block.__exit__)
        hf_rocm.auto_prepare(False)
        for _, model, _ in self.models:
            hf_rocm.restore(model)
        hf_rocm.deactivate()
        while self.wrappers:
            remaining = len(self.wrappers)
            self.unwrap()
            # The next operation undoes a change that was below another wrapper.
            hf_rocm.deactivate()
            assert len(self.wrappers) < remaining, "a change by hf_rocm is still above another wrapper"
        for kind, model, _ in self.models:
            assert torch.equal(tokens_of(model), World.expected[kind])
        hf_rocm.deactivate()
        self.models.clear()
        assert not changed()


def options_forced():
    patch = pytest.MonkeyPatch.context()
    context = patch.__enter__()
    context.setenv("HF_ROCM_FORCE", "1")
    return _Undo(context)


class _Undo:
    def __init__(self, patch):
        self.patch = patch

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.patch.undo()


class TestReversal(Reversal.TestCase):
    settings = settings(max_examples=8, stateful_step_count=12)


@pytest.mark.slow
class TestMoreReversals(Reversal.TestCase):
    settings = settings(max_examples=12, stateful_step_count=20)


def test_a_compiled_forward_leaves_no_changes():
    torch._dynamo.reset()
    stock = torch.compile(copy.deepcopy(World.models["llama"]).forward, backend="eager")
    with torch.no_grad():
        stock(IDS)
    del stock
    torch._dynamo.reset()
    gc.collect()
    # The compiler changes nn.Module once, at its first compilation.
    before = snapshot.take()
    model = hf_rocm.prepare(copy.deepcopy(World.models["llama"]), force=True)
    hf_rocm.compile(model, force=True, backend="eager")
    with torch.no_grad():
        model(IDS)
    hf_rocm.restore(model)
    hf_rocm.deactivate()
    del model
    torch._dynamo.reset()
    gc.collect()
    assert not snapshot.differences(before)
