"""Our kernel puts a layer's keys and values into the cache: what stock would have done, where that is known."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_rocm import layers, ops, options
from hf_rocm.generation.cache import DecodeCache
from tests.triton.test_rope import angles, heads

H, KV, D = 4, 2, 8


class Module:
    layer_idx = 0


def config():
    return LlamaConfig(num_hidden_layers=1, num_attention_heads=H, num_key_value_heads=KV, hidden_size=H * D)


def call(cache, length, *, seed, tier, dtype=torch.bfloat16, batch=2):
    """One call of a layer's rope and cache; what it returned, and the operations that ran."""
    query, key, value = (each + seed for each in heads(batch, length, dtype, h=H, kv=KV, d=D))
    with options.override(tier=tier), ops.recording() as routes:
        results = layers.rotate_and_remember(
            Module(), apply_rotary_pos_emb, query, key, value, angles(1, length, D, dtype), cache, {}
        )
    return results, [route.operation for route in routes]


def both(make, *lengths):
    """The same calls through our kernel and, from a cache of their own, through stock."""
    ours, stock = make(), make()
    for seed, length in enumerate(lengths):
        mine, operations = call(ours, length, seed=seed, tier="triton")
        theirs, without = call(stock, length, seed=seed, tier="torch")
        assert without == ["rope"]
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)
        yield operations, ours, stock


def test_a_static_layer_is_written_to_and_counts():
    steps = list(both(lambda: StaticCache(config=config(), max_cache_len=16), 5, 1, 3, 1))
    # the first call allocates the layer
    assert [operations for operations, _, _ in steps] == [["rope"], *[["rope_into_cache"]] * 3]
    _, ours, stock = steps[-1]
    assert ours.layers[0].cumulative_length.item() == stock.layers[0].cumulative_length.item() == 10
    assert ours.get_seq_length() == 10


def test_the_cache_of_recorded_steps_is_written_to_and_counts():
    steps = list(both(lambda: DecodeCache([None], capacity=16, limit=32), 5, 1, 1))
    assert [operations for operations, _, _ in steps] == [["rope"], ["rope_into_cache"], ["rope_into_cache"]]
    _, ours, stock = steps[-1]
    assert ours.layers[0].rows == stock.layers[0].rows == 7


def test_one_token_alone_counts_on_in_the_kernel():
    cache = StaticCache(config=config(), max_cache_len=8)
    for seed in range(3):
        _, operations = call(cache, 1, seed=seed, tier="triton", batch=1)
    assert operations == ["rope_into_cache"] and cache.layers[0].cumulative_length.item() == 3


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
def test_other_caches_are_asked(make):
    assert [operations for operations, _, _ in both(make, 2, 1)] == [["rope"], ["rope"]]


def test_a_cache_of_another_dtype_is_asked():
    """Stock's own error, not a conversion of ours."""
    cache = StaticCache(config=config(), max_cache_len=8)
    call(cache, 1, seed=0, tier="triton", dtype=torch.float32)
    with pytest.raises(RuntimeError, match="same dtype"):
        call(cache, 1, seed=0, tier="triton", dtype=torch.bfloat16)


def test_what_the_user_put_in_the_functions_place_runs():
    cache = StaticCache(config=config(), max_cache_len=8)
    call(cache, 1, seed=0, tier="triton")
    query, key, value = heads(2, 1, torch.bfloat16, h=H, kv=KV, d=D)
    with options.override(tier="triton"), ops.recording() as routes:
        out, _, _ = layers.rotate_and_remember(
            Module(),
            lambda query, key, cos, sin: (query, key),
            query,
            key,
            value,
            angles(1, 1, D, torch.bfloat16),
            cache,
            {},
        )
    assert routes == [] and torch.equal(out, query)


def test_machinery_that_changed_is_asked(monkeypatch):
    from hf_rocm.generation import features

    monkeypatch.setattr(features, "refuses", lambda feature: "it changed")
    make = lambda: StaticCache(config=config(), max_cache_len=8)  # noqa: E731
    assert [operations for operations, _, _ in both(make, 2, 1)] == [["rope"], ["rope"]]
