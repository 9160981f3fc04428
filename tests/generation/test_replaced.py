"""A user's or a library's replacement functions are called as in stock transformers, even after steps were recorded."""

from __future__ import annotations

import copy
import functools
import time
import timeit

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import masking_utils, modeling_utils
from transformers.models.llama import modeling_llama

import hf_rocm
from hf_rocm import ops
from hf_rocm.generation.state import known
from hf_rocm.generation.watch import masks_replaced, watches_of
from hf_rocm.layers import attention as attention_layer
from hf_rocm.overlay import bind
from tests.generation.conftest import counted, generate, make, prompt
from tests.replacing import masked, replaced, scaled

FIVE = int(transformers.__version__.split(".")[0]) >= 5


llama = modeling_llama
attention = modeling_utils.AttentionInterface._global_mapping
activation = type(make("llama").model.layers[0].mlp.act_fn)

# name → (owner, attribute, replacement, classes that `explain` reports as stock)
PLACES = {
    "rope": (llama, "apply_rotary_pos_emb", scaled, {"LlamaAttention"}),
    "half": (llama, "rotate_half", scaled, {"LlamaAttention"}),
    "sdpa": (F, "scaled_dot_product_attention", scaled, {"LlamaAttention"}),
    "registered": (attention, "sdpa", scaled, {"LlamaAttention"}),
    "local": (modeling_utils.ALL_ATTENTION_FUNCTIONS, "sdpa", scaled, {"LlamaAttention"}),
    "mlp": (llama.LlamaMLP, "forward", scaled, set()),
    "norm": (llama.LlamaRMSNorm, "forward", scaled, set()),
    "attention": (llama.LlamaAttention, "forward", scaled, set()),
    "rotary": (llama.LlamaRotaryEmbedding, "forward", scaled, set()),
    "activation": (activation, "forward", scaled, set()),
    "linear": (nn.Linear, "forward", scaled, set()),
    "functional linear": (F, "linear", scaled, set()),
    "embedding": (nn.Embedding, "forward", scaled, set()),
    "masks": (masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, "sdpa", masked, set()),
}


def logits(model):
    with torch.no_grad():
        return model(**prompt(padded=2)).logits


def close(prepared, stock):
    torch.testing.assert_close(logits(prepared), logits(stock), rtol=1e-4, atol=1e-4)


def stock_classes(model):
    return {part.cls for part in hf_rocm.explain(model).parts if part.stock_because is not None}


@pytest.mark.parametrize("name", PLACES)
def test_a_replacement_is_called_and_the_kernels_run_again_after_it_is_removed(name, pair):
    owner, attribute, change, classes = PLACES[name]
    prepared, stock = pair(graphs=None)
    before = generate(stock)
    assert torch.equal(generate(prepared), before)
    recorded, replayed = counted(prepared)
    assert recorded and replayed
    with replaced(owner, attribute, change):
        after = generate(stock)
        close(prepared, stock)
        assert stock_classes(prepared) == classes
        for _ in range(2):
            assert torch.equal(generate(prepared), after)
        assert counted(prepared) == (recorded, replayed), "a recording was replayed"
    assert not torch.equal(before, after), "the replacement did not change the tokens"
    assert stock_classes(prepared) == set()
    with ops.recording() as routes, torch.no_grad():
        close(prepared, stock)
    assert {"linear", "rope", "attention"} <= {route.operation for route in routes}
    assert torch.equal(generate(prepared), before)
    assert counted(prepared)[0] == recorded and counted(prepared)[1] > replayed, "the old recording was not reused"


@pytest.mark.parametrize("name", PLACES)
def test_a_replacement_before_prepare_is_called(name, recorded_on_cpu):
    owner, attribute, change, _ = PLACES[name]
    stock = make("llama")
    before = generate(stock)
    hf_rocm.deactivate("llama")
    try:
        with replaced(owner, attribute, change):
            prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True)
            close(prepared, stock)
            assert torch.equal(generate(prepared), generate(stock))
        for reason in map(bind.refused, bind.waiting):
            assert "call `hf_rocm.prepare` again" in reason
        hf_rocm.prepare(prepared, force=True)
        for _ in range(2):
            assert torch.equal(generate(prepared), before)
        assert stock_classes(prepared) == set() and not bind.waiting
        assert {part.cls for part in hf_rocm.explain(prepared).parts} >= {"LlamaMLP", "LlamaRMSNorm", "LlamaAttention"}
    finally:
        hf_rocm.deactivate("llama")


def test_a_replacement_during_a_call_is_called(pair):
    """Replays stop at the step at which a function was replaced."""
    prepared, stock = pair(graphs=None)
    generate(prepared)

    def run(model):
        calls = []

        def criterion(ids, scores, **_):
            calls.append(None)
            if len(calls) == 5:
                llama.apply_rotary_pos_emb = scaled(rope)
            return torch.zeros(len(ids), dtype=torch.bool)

        try:
            return generate(model, stopping_criteria=[criterion])
        finally:
            llama.apply_rotary_pos_emb = rope

    rope = llama.apply_rotary_pos_emb
    expected = run(stock)
    assert not torch.equal(expected, generate(stock))
    assert torch.equal(run(prepared), expected)


def test_a_forward_set_during_a_call_is_called(pair):
    prepared, stock = pair(graphs=None)
    generate(prepared)

    def run(model):
        count = []

        def forward(*args, **kwargs):
            count.append(len(count))
            return type(model).forward(model, *args, **kwargs)

        def criterion(ids, scores, **_):
            if ids.shape[1] == 12:
                model.forward = functools.wraps(type(model).forward)(forward)
            return torch.zeros(len(ids), dtype=torch.bool)

        tokens = generate(model, stopping_criteria=[criterion])
        del model.forward
        return tokens, count

    for _ in range(2):
        (tokens, count), (expected, others) = run(prepared), run(stock)
        assert torch.equal(tokens, expected) and count == others != []
    assert counted(prepared)[1]


def test_a_hook_registered_during_a_call_is_called(pair):
    prepared, stock = pair(graphs=None)
    generate(prepared)

    def run(model):
        handles = []

        def change(module, args, output):
            return output * 1.25

        def criterion(ids, scores, **_):
            # This module is not part of the model.
            handles.append(nn.Linear(1, 1).register_forward_hook(change))
            if len(handles) == 5:
                handles.append(model.model.layers[0].mlp.register_forward_hook(change))
            return torch.zeros(len(ids), dtype=torch.bool)

        try:
            return generate(model, stopping_criteria=[criterion])
        finally:
            for handle in handles:
                handle.remove()

    expected = run(stock)
    assert not torch.equal(expected, generate(stock))
    before = counted(prepared)[1]
    assert torch.equal(run(prepared), expected)
    # The hook of another module changed nothing.
    assert counted(prepared)[1] > before
    assert "registered during a call" in str(hf_rocm.explain(prepared).decoding)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (llama, "eager_attention_forward"),
        (attention, "flash_attention_2"),
        (llama, "LlamaForSequenceClassification"),
        (F, "gelu"),
        (nn.LayerNorm, "forward"),
    ],
)
def test_replacing_an_unused_function_changes_nothing(owner, name, pair):
    prepared, stock = pair()
    generate(prepared)
    recorded, replayed = counted(prepared)
    with replaced(owner, name, scaled), ops.recording() as routes:
        logits(prepared)
        assert stock_classes(prepared) == set()
        assert torch.equal(generate(prepared), generate(stock))
    assert {"linear", "rope", "attention"} <= {route.operation for route in routes}
    assert counted(prepared)[0] == recorded and counted(prepared)[1] > replayed


def test_training_runs_through_the_replacement(pair):
    """Gradients are computed through the replacement."""
    prepared, stock = pair(graphs=None)
    with replaced(llama, "apply_rotary_pos_emb", scaled), replaced(activation, "forward", scaled):
        for model in (prepared, stock):
            model(**prompt(), labels=prompt()["input_ids"]).loss.backward()
    for parameter, reference in zip(prepared.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not FIVE, reason="4.x has no experts interface")
def test_a_replaced_experts_function_is_called(pair):
    from transformers.integrations import moe

    prepared, stock = pair("mixtral", graphs=None)
    before = generate(stock)
    assert torch.equal(generate(prepared), before)
    for name in ("grouped_mm", "batched_mm", "eager"):
        for model in (prepared, stock):
            model.set_experts_implementation(name)
        if name == "eager":
            continue
        with replaced(moe.ALL_EXPERTS_FUNCTIONS, name, scaled):
            assert torch.equal(generate(prepared), generate(stock))
    with replaced(type(prepared.model.layers[0].mlp.experts), "_apply_gate", scaled):
        assert torch.equal(generate(prepared), generate(stock))


@pytest.mark.skipif(not FIVE, reason="4.x has no experts interface")
@pytest.mark.parametrize("name", ["grouped_mm", "batched_mm"])
def test_a_replaced_method_that_an_experts_function_calls_is_called(name, pair):
    prepared, stock = pair("mixtral", graphs=None)
    for model in (prepared, stock):
        model.set_experts_implementation(name)
    # After these calls, not every replay is compared with the step itself.
    for _ in range(6):
        generate(prepared)
    with replaced(type(prepared.model.layers[0].mlp.experts), "_apply_gate", scaled):
        assert torch.equal(generate(prepared), generate(stock))
    assert known(prepared).disabled is None


class Equal:
    """A wrapper that compares equal to the wrapped function, like wrapt's."""

    def __init__(self, function):
        self.function, self.__wrapped__ = scaled(function), function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def __eq__(self, other):
        return True

    __hash__ = None


def test_wrappers_that_compare_equal_to_the_wrapped_function_are_called(pair):
    prepared, stock = pair(graphs=None)
    before = generate(prepared)
    for name in ("apply_rotary_pos_emb", "rotate_half"):
        with replaced(llama, name, Equal):
            expected = generate(stock)
            assert not torch.equal(before, expected)
            assert torch.equal(generate(prepared), expected)
            assert stock_classes(prepared) == {"LlamaAttention"}


def test_a_removed_function_is_named(pair):
    prepared, _ = pair(graphs=None)
    generate(prepared)
    step, call = watches_of(prepared).step, watches_of(prepared).call
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(llama, "rotate_half")
        assert not step.unchanged() and not call.unchanged()
        assert step.difference() == call.difference() == "rotate_half of modeling_llama was removed"
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(attention, "sdpa")
        assert step.difference() == call.difference() == "'sdpa' of ALL_ATTENTION_FUNCTIONS was removed"
    assert step.unchanged() and call.unchanged()


def empty_calls(check):
    """The time of a call, divided by that of an empty function. Other load has little effect on this ratio."""

    def shortest(function):
        return min(timeit.repeat(function, number=2000, repeat=20, timer=time.thread_time))

    return shortest(check) / shortest(lambda: None)


def test_the_checks_stay_within_their_budgets(pair):
    """The cost of the checks in a recorded step, and in a layer of an uncaptured step.

    The unit is a call of an empty function, which takes about 35 ns.
    """
    prepared, _ = pair(graphs=None)
    generate(prepared)
    watches = watches_of(prepared)
    assert watches_of(prepared) is watches, "the watches were created again"
    assert empty_calls(watches.step.unchanged) + empty_calls(lambda: masks_replaced(prepared)) < 80
    layer = prepared.model.layers[0]
    modules = (layer, layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm)
    checks = [binding.watch.unchanged for binding in map(bind.binding_of, modules) if binding.watch is not None]
    cls = type(layer.self_attn)
    checks.append(lambda: attention_layer._is_stock(cls, "sdpa"))
    assert len(checks) >= 4
    assert sum(map(empty_calls, checks)) < 40
