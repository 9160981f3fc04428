"""`slot` returns the rows to which `update` would write, in a static cache or in an empty dynamic cache.

It supports static caches from transformers 4.56 on, and dynamic caches from 4.57 on. Otherwise, it returns None.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_rocm import layers, ops, options
from hf_rocm.layers.cached_attention import rotate_and_update_cache, slot

B, H, KV, D, LENGTH = 2, 4, 2, 8, 12
RELEASE = Version(transformers.__version__)
# Earlier releases don't distinguish static layers from offloaded ones.
FROM = Version("4.56")

since = pytest.mark.skipif(RELEASE < FROM, reason="before 4.56, static caches have no slot")


def static_cache():
    config = LlamaConfig(
        num_hidden_layers=1,
        num_attention_heads=H,
        num_key_value_heads=KV,
        hidden_size=H * D,
        max_position_embeddings=64,
    )
    if RELEASE < FROM:
        return StaticCache(config=config, max_batch_size=B, max_cache_len=LENGTH)
    return StaticCache(config=config, max_cache_len=LENGTH)


def call(seed, length):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(B, heads, length, D, generator=generator) for heads in (H, KV, KV))
    angles = torch.rand(1, length, D // 2, generator=generator).repeat(1, 1, 2)
    return query, key, value, (angles.cos(), angles.sin())


class Module:
    layer_idx = 0


@since
def test_the_rows_are_those_that_update_writes():
    actual, stock = static_cache(), static_cache()
    for seed, (first, length) in enumerate(((0, 3), (3, 1), (4, 2))):
        query, key, value, angles = call(seed, length)
        arguments = {"cache_position": torch.arange(first, first + length)}
        with options.override(tier="torch"):
            expected = rotate_and_update_cache(
                Module(), apply_rotary_pos_emb, query, key, value, angles, stock, arguments
            )
            result = slot(actual, 0, key, value, arguments)
            if not seed:
                # Nothing is allocated yet.
                assert result is None
                rotate_and_update_cache(Module(), apply_rotary_pos_emb, query, key, value, angles, actual, arguments)
                continue
            rotated = ops.rope_into_cache(
                query, key, value, *angles, keys=result.keys, values=result.values, position=result.position
            )
        for tensor, reference in zip((rotated, result.keys, result.values), expected, strict=True):
            assert torch.equal(tensor, reference)
    counters = [getattr(cache.layers[0], "cumulative_length", None) for cache in (actual, stock)]
    assert counters[0] is counters[1] is None or int(counters[0]) == int(counters[1]) == 6


@since
def test_another_dtype_batch_head_dim_or_layer_has_no_slot():
    cache = static_cache()
    _, key, value, _ = call(0, 1)
    arguments = {"cache_position": torch.tensor([0])}
    cache.update(key, value, 0, arguments)
    assert slot(cache, 0, key, value, arguments) is not None
    assert slot(cache, 0, key.half(), value, arguments) is None
    assert slot(cache, 0, key[:1], value[:1], arguments) is None
    assert slot(cache, 0, key, value[..., :4], arguments) is None
    assert slot(cache, 7, key, value, arguments) is None
    if not hasattr(cache.layers[0], "cumulative_length"):
        assert slot(cache, 0, key, value, {}) is None
        assert slot(cache, 0, key, value, {"cache_position": torch.tensor([0, 1])}) is None


@pytest.mark.skipif(Version("4.57") > RELEASE, reason="before 4.57, layers of dynamic caches have no is_initialized")
def test_an_empty_layer_of_a_dynamic_cache_has_new_rows():
    cache = DynamicCache(config=LlamaConfig(num_hidden_layers=1))
    _, key, value, _ = call(0, 3)
    rows = slot(cache, 0, key, value[..., :4], {})
    assert (rows.keys.shape, rows.values.shape, rows.position) == (key.shape, (B, KV, 3, 4), None)
    # Nothing has changed yet.
    assert not cache.layers[0].is_initialized and cache.layers[0].keys is None
    rows.written()
    assert cache.layers[0].keys is rows.keys and cache.get_seq_length() == 3
    assert slot(cache, 0, key, value, {}) is None
    cache = DynamicCache(config=LlamaConfig(num_hidden_layers=1))
    assert slot(cache, 0, key[:, :, :0], value[:, :, :0], {}) is None
    assert slot(cache, 0, key, value.half(), {}) is None


@pytest.mark.parametrize("cache", [DynamicCache(), None], ids=["dynamic", "none"])
def test_a_cache_without_fixed_rows_has_no_slot(cache):
    query, key, value, angles = call(0, 3)
    with options.override(tier="torch"), ops.recording() as routes:
        results = rotate_and_update_cache(Module(), apply_rotary_pos_emb, query, key, value, angles, cache, {})
    assert [route.operation for route in routes] == ["rope"]
    assert torch.equal(results[1], layers.rotate(apply_rotary_pos_emb, query, key, angles)[1])


def one_position(query, key, cos):
    return query, key, cos[:, :1]


def keys_of_one_row(query, key, cos):
    return query, key[:1], cos


def angles_of_another_dtype(query, key, cos):
    return query, key, cos.double()


@pytest.mark.parametrize("change", [one_position, keys_of_one_row, angles_of_another_dtype])
@pytest.mark.parametrize("cached", [False, True])
def test_stock_code_rotates_other_shapes_and_dtypes(change, cached):
    query, key, value, (cos, sin) = call(0, 3)
    query, key, cos = change(query, key, cos)
    sin = change(query, key, sin)[2]
    expected = apply_rotary_pos_emb(query, key, cos, sin)
    cache = DynamicCache() if cached else None
    with ops.recording() as routes:
        value = value[: len(key)]
        actual = rotate_and_update_cache(Module(), apply_rotary_pos_emb, query, key, value, (cos, sin), cache, {})
    assert not routes
    for one, other in zip(actual, expected, strict=False):
        assert torch.equal(one, other)


def test_angles_that_stock_refuses_raise_its_error():
    query, key, value, (cos, sin) = call(0, 3)
    with pytest.raises(RuntimeError, match="must match the size"):
        rotate_and_update_cache(Module(), apply_rotary_pos_emb, query, key, value, (cos[:, :2], sin[:, :2]), None, {})


@pytest.mark.skipif(RELEASE >= FROM, reason="from 4.56 on, static caches have slots")
def test_earlier_static_caches_have_no_slot():
    cache = static_cache()
    _, key, value, _ = call(0, 1)
    arguments = {"cache_position": torch.tensor([0])}
    cache.update(key, value, 0, arguments)
    assert slot(cache, 0, key, value, arguments) is None
