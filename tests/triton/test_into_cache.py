"""For known caches, the Triton kernel writes a layer's keys and values into the cache as stock does."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hf_rocm import ops, options
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.layers.cached_attention import rotate_and_update_cache
from hf_rocm.ops import pointwise
from hf_rocm.overlay import bind
from hf_rocm.overlay.activate import activate
from tests.triton.routed import random
from tests.triton.test_rope import angles, heads

H, KV, D = 4, 2, 8


class Module:
    layer_idx = 0


def config():
    return LlamaConfig(num_hidden_layers=1, num_attention_heads=H, num_key_value_heads=KV, hidden_size=H * D)


def dynamic_cache():
    return DynamicCache(config=config())


def decode_cache():
    return DecodeCache([None], capacity=16, limit=32)


def call(cache, length, *, seed, tier, dtype=torch.bfloat16, batch=2):
    """Call a layer's rope and cache update once. Returns the results and the operations that ran."""
    states = (head + seed for head in heads(batch, length, dtype, h=H, kv=KV, d=D))
    return run(*states, angles(1, length, D, dtype), cache, tier=tier)


def run(query, key, value, tables, cache, *, tier="triton"):
    """Returns (the results, the operations that ran). tables: cos and sin."""
    with options.override(tier=tier), ops.recording() as routes:
        results = rotate_and_update_cache(Module(), apply_rotary_pos_emb, query, key, value, tables, cache, {})
    return results, [route.operation for route in routes]


def run_both(make, *lengths):
    """Run the same calls in the Triton kernel and, with a separate cache, in the torch tier with stock's update."""
    actual, stock = make(), make()
    for seed, length in enumerate(lengths):
        outputs, operations = call(actual, length, seed=seed, tier="triton")
        expected, stock_operations = call(stock, length, seed=seed, tier="torch")
        assert stock_operations == ["rope"]
        for one, other in zip(outputs, expected, strict=True):
            assert torch.equal(one, other)
        yield operations, actual, stock


def test_a_static_layer_is_written_to_and_its_length_advances():
    steps = list(run_both(lambda: StaticCache(config=config(), max_cache_len=16), 5, 1, 3, 1))
    # the first call allocates the cache layer
    assert [operations for operations, _, _ in steps] == [["rope"], *[["rope_into_cache"]] * 3]
    _, actual, stock = steps[-1]
    assert actual.layers[0].cumulative_length.item() == stock.layers[0].cumulative_length.item() == 10
    assert actual.get_seq_length() == 10


def test_the_cache_of_recorded_steps_is_written_to_and_its_length_advances():
    steps = list(run_both(decode_cache, 5, 1, 1))
    assert [operations for operations, _, _ in steps] == [["rope_into_cache"]] * 3
    _, actual, stock = steps[-1]
    assert actual.layers[0].rows == stock.layers[0].rows == 7
    assert torch.equal(actual.layers[0].keys[:, :, :7], stock.layers[0].keys[:, :, :7])


def test_calls_with_a_single_token_advance_the_position():
    cache = StaticCache(config=config(), max_cache_len=8)
    for seed in range(3):
        _, operations = call(cache, 1, seed=seed, tier="triton", batch=1)
    assert operations == ["rope_into_cache"] and cache.layers[0].cumulative_length.item() == 3


class Attention(torch.nn.Module):
    """An attention layer with query and key norms, which an overlay serves."""

    layer_idx = 0

    def __init__(self):
        super().__init__()
        activate("qwen3", everywhere=False)
        self.q_norm, self.k_norm = (Qwen3RMSNorm(D, eps=eps) for eps in (0.5, 0.125))
        for seed, norm in enumerate(self.children()):
            bind.set_mode(norm, bind.ON)
            norm.weight.data = random(D, dtype=torch.bfloat16, seed=seed)


def normalised_call(module, cache, *, tier="triton", **terms):
    query, key, value = heads(1, 1, torch.bfloat16, h=H, kv=KV, d=D)
    with torch.no_grad(), options.override(tier=tier), ops.recording() as routes:
        results = rotate_and_update_cache(
            module, apply_rotary_pos_emb, query, key, value, angles(1, 1, D, torch.bfloat16), cache, {}, **terms
        )
    return results, [route.operation for route in routes]


def written_cache():
    cache = StaticCache(config=config(), max_cache_len=8)
    call(cache, 2, seed=0, tier="torch", batch=1)
    return cache


NORMS = ("q_norm", "k_norm")


def test_norms_are_part_of_the_kernel():
    module = Attention()
    actual, operations = normalised_call(module, written_cache(), norms=NORMS)
    stock, stock_operations = normalised_call(module, written_cache(), tier="torch", norms=NORMS)
    assert operations == ["rope_into_cache"] and stock_operations == ["rms_norm", "rms_norm", "rope"]
    for one, other in zip(actual, stock, strict=True):
        # F.rms_norm rounds once.
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-7)
    plain, _ = normalised_call(module, written_cache())
    assert not torch.equal(plain[0], actual[0])


def hooked(module):
    module.k_norm.register_forward_hook(lambda *_: None)


def without_one(module):
    del module.q_norm


def of_another_kind(module):
    module.k_norm = torch.nn.LayerNorm(D).bfloat16()


def switched_off(module):
    bind.set_mode(module.q_norm, bind.OFF)


@pytest.mark.parametrize(
    ("change", "called"),
    [(hooked, 2), (without_one, 1), (of_another_kind, 1), (switched_off, 1)],
    ids=["a hook", "one norm", "another norm", "stock"],
)
def test_norms_that_must_be_called_are_called(change, called):
    module = Attention()
    change(module)
    actual, operations = normalised_call(module, written_cache(), norms=NORMS)
    assert operations == [*["rms_norm"] * called, "rope_into_cache"]
    stock, _ = normalised_call(module, written_cache(), tier="torch", norms=NORMS)
    torch.testing.assert_close(actual[0], stock[0], rtol=2**-6, atol=2**-7)


def test_norms_of_another_tier_are_called():
    module = Attention()
    _, operations = normalised_call(module, written_cache(), tier="rms_norm=torch,rope=triton", norms=NORMS)
    assert operations == ["rms_norm", "rms_norm", "rope_into_cache"]


def test_a_user_kernel_for_a_part_is_called():
    """A kernel that the user registered is not replaced by one that also writes to the cache."""
    module, calls = Attention(), []

    def own(query, key, cos, sin, interleaved):
        calls.append(query.shape)
        return pointwise.eager_rope(query, key, cos, sin, interleaved)

    remove = ops.register("rope", name="mine", call=own, refuses=lambda spec, device: None, check=False)
    try:
        results, operations = normalised_call(module, written_cache(), tier="", norms=NORMS)
        _, named = normalised_call(module, written_cache(), tier="triton", norms=NORMS)
    finally:
        remove()
    assert len(calls) == 1 and operations == ["rms_norm", "rms_norm", "rope"]
    # A named tier takes precedence.
    assert named == ["rope_into_cache"]
    expected, operations = normalised_call(module, written_cache(), tier="", norms=NORMS)
    assert operations == ["rope_into_cache"]
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)


def test_a_module_without_norms_applies_none():
    _, operations = normalised_call(Bare(), written_cache(), norms=NORMS)
    assert operations == ["rope_into_cache"]


class Bare(torch.nn.Module):
    layer_idx = 0


@pytest.mark.parametrize("cache", [written_cache, DynamicCache], ids=["static", "dynamic"])
def test_angles_may_cover_half_of_the_head_dim(cache):
    """gpt-oss's rotary function takes cos and sin that cover half of the head dim."""
    query, key, value = heads(1, 1, torch.bfloat16, h=H, kv=KV, d=D)
    once = tuple(angle[..., : D // 2] for angle in angles(1, 1, D, torch.bfloat16))
    results = {}
    for tier in ("triton", "torch"):
        own = cache()
        with torch.no_grad(), options.override(tier=tier), ops.recording() as routes:
            results[tier] = rotate_and_update_cache(
                Module(), gpt_oss.apply_rotary_pos_emb, query, key, value, once, own, {}, once=True
            )
        operations = [route.operation for route in routes]
        assert operations == (["rope_into_cache"] if (tier, cache) == ("triton", written_cache) else [])
    for one, other in zip(results["triton"], results["torch"], strict=True):
        assert torch.equal(one, other)


class Subclassed(StaticLayer):
    pass


class Updated(StaticCache):
    def update(self, *args, **kwargs):
        return super().update(*args, **kwargs)


def other_class():
    cache = StaticCache(config=config(), max_cache_len=8)
    cache.layers[0] = Subclassed(max_cache_len=8)
    return cache


@pytest.mark.parametrize(
    "make",
    [DynamicCache, other_class, lambda: Updated(config=config(), max_cache_len=8)],
    ids=["dynamic", "another layer", "another update"],
)
def test_other_caches_are_updated_by_stock(make):
    assert [operations for operations, _, _ in run_both(make, 2, 1)] == [["rope"], ["rope"]]


def test_a_cache_of_another_dtype_raises_stocks_error():
    """New keys and values are not converted to the dtype of the cache."""
    cache = StaticCache(config=config(), max_cache_len=8)
    call(cache, 1, seed=0, tier="triton", dtype=torch.float32)
    with pytest.raises(RuntimeError, match="same dtype"):
        call(cache, 1, seed=0, tier="triton", dtype=torch.bfloat16)


@pytest.mark.parametrize("dynamic", [False, True])
def test_unknown_cache_code_is_called(dynamic, monkeypatch):
    from hf_rocm import features

    monkeypatch.setattr(features, "refuses", lambda feature: "it changed")
    make = dynamic_cache if dynamic else lambda: StaticCache(config=config(), max_cache_len=8)
    assert [operations for operations, _, _ in run_both(make, 2, 1)] == [["rope"], ["rope"]]
