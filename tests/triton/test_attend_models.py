"""Recorded steps of whole models: every attention layer is one operation, and the tokens are stock's."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from hf_rocm import ops
from hf_rocm.layers import cached_attention
from hf_rocm.ops import attention_eager
from hf_rocm.ops.triton import decode
from hf_rocm.overlay import bind
from tests.generation.conftest import counted, generate, pair, prompt, recorded_on_cpu  # noqa: F401 - fixtures
from tests.generation.emulator import Operators

# Every model, with its number of padding tokens.
MODELS = {"llama": 0, "qwen3": 3, "gemma3": 3, "gpt_oss": 3}
OPERATIONS = {"rope", "rope_into_cache", "decode_attention", "attention", "attend_into_cache"}


@pytest.fixture(autouse=True)
def several_splits(monkeypatch):
    monkeypatch.setattr(decode, "units", lambda device: 8)
    decode._work.cache_clear()


@pytest.fixture(autouse=True)
def launches_are_recorded(monkeypatch):
    """Make emulated recordings contain the launches of interpreted kernels, not the interpreter's operators."""
    from triton.runtime.interpreter import GridExecutor

    stock = GridExecutor.__call__

    def call(executor, *tensors, **constants):
        recording = _get_current_dispatch_mode()
        if not isinstance(recording, Operators):
            stock(executor, *tensors, **constants)
            return
        with _disable_current_modes():
            stock(executor, *tensors, **constants)
        recording.kept.append(
            (lambda *arguments, **keywords: stock(executor, *arguments, **keywords), tensors, constants, [])
        )

    monkeypatch.setattr(GridExecutor, "__call__", call)


def steps(routes, tokens=1):
    """Returns the attention operations that were called with this number of queries."""
    return {route.operation for route in routes if route.operation in OPERATIONS and route.shapes[0][2] == tokens}


@pytest.mark.parametrize("kind", MODELS)
def test_a_step_of_one_token_is_one_operation(kind, pair):  # noqa: F811
    prepared, stock = pair(kind)
    inputs = prompt(padded=MODELS[kind])
    with torch.no_grad(), ops.recording() as routes:
        actual = generate(prepared, inputs, new=9)
    assert torch.equal(actual, generate(stock, inputs, new=9))
    assert counted(prepared)[1] == 5
    assert steps(routes) == {"attend_into_cache"}
    assert {route.tier for route in routes if route.operation == "attend_into_cache"} == {"triton"}
    angles = [route for route in routes if route.operation == "rotary_angles"]
    assert {route.tier for route in angles} == {"triton"}
    assert {route.shapes[1][1] for route in angles} == {1, inputs["input_ids"].shape[1]}, "in prompts and in steps"


def test_recorded_steps_follow_a_changed_rotary_embedding(pair):  # noqa: F811
    prepared, stock = pair("llama")
    outputs = []
    with torch.no_grad():
        for scaling, factor in ((1.0, 1.0), (1.5, 1.0), (1.5, 0.37)):
            for model in (prepared, stock):
                model.model.rotary_emb.attention_scaling = scaling
                model.model.rotary_emb.inv_freq.mul_(factor)
            outputs.append(generate(stock, new=8))
            assert torch.equal(generate(prepared, new=8), outputs[-1])
    assert counted(prepared)[1] == 15 and len({tuple(output.flatten().tolist()) for output in outputs}) == 3


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_a_step_that_verifies_drafts_is_one_operation(kind, pair):  # noqa: F811
    prepared, stock = pair(kind)
    inputs = {name: tensor.repeat(1, 3) for name, tensor in prompt(rows=1).items()}
    drafts = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}
    with torch.no_grad(), ops.recording() as routes:
        actual = generate(prepared, inputs, new=14, **drafts)
    assert torch.equal(actual, generate(stock, inputs, new=14))
    assert steps(routes, tokens=4) == {"attend_into_cache"}


def test_other_steps_call_the_operations_one_by_one(pair):  # noqa: F811
    """The tokens are the same if no kernel serves the operation, and also if a norm runs stock code."""
    prepared, stock = pair("qwen3")
    expected = generate(stock, new=8)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch, ops.recording() as routes:
        patch.setattr(cached_attention, "one_step_kernel", lambda *tensors, **terms: False)
        assert torch.equal(generate(prepared, new=8), expected)
    assert steps(routes) == {"rope_into_cache", "decode_attention"}
    partly, _ = pair("qwen3")
    bind.set_mode(partly.model.layers[0].self_attn.q_norm, bind.OFF)
    with torch.no_grad(), ops.recording() as routes:
        assert torch.equal(generate(partly, new=8), expected)
    assert steps(routes) == {"attend_into_cache", "rope_into_cache", "decode_attention"}


def test_a_kernel_that_the_user_registered_for_attention_is_called(pair):  # noqa: F811
    prepared, stock = pair("llama")
    calls = []

    def own(query, key, value, **terms):
        calls.append(query.shape[2])
        return attention_eager.attention(query, key, value, **terms)

    def refuses(spec, device):
        return None if spec.one_query and spec.mask is not None else "only steps of one token"

    remove = ops.register("attention", name="mine", call=own, refuses=refuses, check=False)
    try:
        with torch.no_grad(), ops.recording() as routes:
            assert torch.equal(generate(prepared), generate(stock))
    finally:
        remove()
    assert calls and set(calls) == {1} and steps(routes) == {"rope_into_cache", "attention"}
