"""At every step, masks and positions that are advanced in place equal those that transformers would create."""

from __future__ import annotations

import gc

import pytest
import torch
import transformers
from packaging.version import Version

from hf_rocm import patches
from hf_rocm.generation import cache as caches
from hf_rocm.generation import cache_layer, inputs
from hf_rocm.generation.methods import take_away
from hf_rocm.layers import attention as layers
from hf_rocm.ops.attention_eager import attention
from hf_rocm.ops.decode import eager_decode
from hf_rocm.ops.padded import CacheRows
from tests.generation.conftest import KINDS, generate, prompt

FIVE = Version(transformers.__version__) >= Version("5")
SERVED = [kind for kind in KINDS if FIVE or kind != "mixtral"]


@pytest.fixture
def steps(monkeypatch):
    """Count the steps prepared in place, and compare each with transformers' result for the same arguments."""
    compared = []
    take = inputs.Step.inputs

    def checked(step, cache, input_ids):
        in_place = take(step, cache, input_ids)
        expected = step.stock(input_ids)
        compared.append(equal(in_place, expected))
        return in_place

    prepare = inputs._prepare

    def remembering(model, inherited, input_ids, *positional, **arguments):
        step = inputs._step_of(arguments.get("past_key_values"))
        if step is not None:
            step.stock = lambda ids: inherited(ids, **complete)
            # in a call that verifies drafts, hf_rocm removes some arguments that transformers needs: restore them
            complete = step.restored(arguments, input_ids.shape[1]) if step.lacks(arguments) else arguments
        return prepare(model, inherited, input_ids, *positional, **arguments)

    monkeypatch.setattr(inputs.Step, "inputs", checked)
    # the inputs of the first step are transformers' own
    monkeypatch.setattr(inputs.Step, "stock", lambda step, ids: step._inputs, raising=False)
    gc.collect()
    patches.sweep()
    # Models of earlier tests may still be referenced, and the methods of their classes call the original `_prepare`.
    for model in gc.get_objects():
        if issubclass(type(model), transformers.PreTrainedModel) and inputs.MARK in model.__dict__:
            take_away(model, inputs.MARK)
    monkeypatch.setattr(inputs, "_prepare", remembering)
    yield compared
    # The steps' `stock` functions would keep the models alive.
    inputs._steps.clear()
    gc.collect()


def equal(in_place, expected):
    """Whether two steps have the same arguments. Tensors are compared by shape, dtype and values."""
    if isinstance(in_place, torch.Tensor) and isinstance(expected, torch.Tensor):
        return in_place.shape == expected.shape and in_place.dtype == expected.dtype and torch.equal(in_place, expected)
    if isinstance(in_place, dict) and isinstance(expected, dict):
        names = set(in_place) - {"past_key_values"}
        return names == set(expected) - {"past_key_values"} and all(
            equal(in_place[name], expected[name]) for name in names
        )
    return in_place is expected or in_place == expected


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize("padded", [0, 3])
def test_every_step_equals_transformers_preparation(kind, padded, pair, steps):
    in_place, stock = pair(kind)
    call = prompt(padded=padded)
    assert torch.equal(generate(in_place, call, new=24), generate(stock, call, new=24))
    assert len(steps) == 23
    assert all(steps), steps


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_every_step_equals_stock_with_transformers_static_cache(kind, pair, steps):
    in_place, stock = pair(kind, graphs=False)
    call = prompt(padded=3)
    tokens = [generate(model, call, new=24, cache_implementation="static") for model in (in_place, stock)]
    assert torch.equal(*tokens)
    assert len(steps) == 23
    assert all(steps), steps


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_every_step_equals_stock_while_windows_move(kind, pair, steps, monkeypatch):
    # Spare rows; with 4 of them, the window moves every few steps.
    monkeypatch.setattr(cache_layer, "SLACK", 4)
    in_place, stock = pair(kind)
    call = prompt(padded=5)
    assert torch.equal(generate(in_place, call, new=40), generate(stock, call, new=40))
    assert len(steps) == 39
    assert all(steps), steps


@pytest.mark.parametrize("padded", [0, 5])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gemma3"])
def test_every_step_equals_stock_while_drafts_are_verified(kind, padded, pair, steps, monkeypatch):
    """Steps have different numbers of tokens and follow rejected drafts, while windows move and buffers grow."""
    monkeypatch.setattr(caches, "bucket", lambda tokens: -(-tokens // 8) * 8)
    in_place, stock = pair(kind)
    lengths = set()
    take = inputs.Step.inputs

    def remembering(step, cache, input_ids):
        lengths.add(step.tokens(input_ids))
        return take(step, cache, input_ids)

    monkeypatch.setattr(inputs.Step, "inputs", remembering)
    for seed in range(2):
        call = prompt(rows=1, length=11, seed=seed, padded=padded)
        call = {name: torch.cat([value] * 2, dim=1) for name, value in call.items()}
        call["attention_mask"][0, 11:] = 1
        tokens = generate(in_place, call, new=40, prompt_lookup_num_tokens=4, eos_token_id=61)
        assert torch.equal(tokens[:, :62], generate(stock, call, new=40))
    assert len(lengths) > 1 and len(steps) >= 15
    assert all(steps), steps


def test_every_step_equals_stock_while_buffers_grow(pair, steps, monkeypatch):
    monkeypatch.setattr(caches, "bucket", lambda tokens: -(-tokens // 8) * 8)
    in_place, stock = pair("gemma2")
    call = prompt(padded=2)
    assert torch.equal(generate(in_place, call, new=40), generate(stock, call, new=40))
    assert len(steps) == 39
    assert all(steps), steps


def test_key_lengths_agree_with_the_mask(pair, monkeypatch):
    """In every layer, attention with lengths (for a kernel) equals attention with the mask (for PyTorch)."""
    seen = []

    def compare(rows, query, key, value, mask_dtype, *, softcap, sinks):
        mask = masks.pop()
        assert mask.dtype == mask_dtype
        bias = mask if mask.dtype == torch.bool else mask == 0
        plain = {"scale": 0.3, "softcap": None, "sinks": None}
        by_mask, _ = attention(query, key, value, causal=False, window=None, mask=bias, **plain)
        settings = {"starts": rows.key_starts, "window": rows.window, **plain}
        by_rows = eager_decode(query, key, value, rows.key_lengths, **settings)
        seen.append(torch.equal(by_mask, by_rows))
        return False

    masks = []
    visible_keys = layers.visible_keys

    def remembering(module, query, key, value, mask, arguments, **further):
        masks[:] = [mask]
        return visible_keys(module, query, key, value, mask, arguments, **further)

    monkeypatch.setattr(layers, "_kernel_takes", compare)
    monkeypatch.setattr("hf_rocm.layers.cached_attention.visible_keys", remembering)
    in_place, _ = pair("gemma2", graphs=False)
    generate(in_place, prompt(padded=3), new=16, cache_implementation="static")
    assert len(seen) == 15 * in_place.config.num_hidden_layers
    assert all(seen), seen


def test_a_kernel_gets_lengths_instead_of_the_mask(pair, monkeypatch):
    requests = []

    def lengths(padded, query, key, value, **further):
        requests.append(padded)
        raise Reached

    class Reached(Exception):
        pass

    monkeypatch.setattr(layers, "kernel_serves", lambda operation, spec: True)
    monkeypatch.setattr(CacheRows, "attend", lengths)
    in_place, _ = pair("qwen3", graphs=False)
    with pytest.raises(Reached):
        generate(in_place, prompt(padded=3), new=4, cache_implementation="static")
    assert requests[0].key_lengths.tolist() == [8]
    assert requests[0].key_starts.tolist() == [3, 0]


def test_attributes_of_a_mask_are_kept_when_it_is_moved(pair):
    """Layers, accelerate and transformers move and reshape masks: if nothing changes, the mask itself is returned."""
    from accelerate.utils import send_to_device

    masks = []
    in_place, _ = pair("llama", graphs=False)
    in_place.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    generate(in_place, new=4, cache_implementation="static")
    mask = masks[-1]
    assert getattr(mask, layers._ROWS).key_lengths.tolist() == [7 + 4]
    assert mask.contiguous() is mask
    assert mask.to("cpu") is mask
    assert send_to_device({"mask": mask}, "cpu")["mask"] is mask
