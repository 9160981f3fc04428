"""The Triton kernel writes the keys and values of a prompt into known caches; in all other cases, stock does."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import DynamicCache, MistralConfig, StaticCache, cache_utils
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_rocm import features
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.layers.cached_attention import _may_have_slot, slot
from tests.triton.test_into_cache import KV, D, H, call, config, decode_cache, dynamic_cache, run, run_both
from tests.triton.test_rope import angles, heads


@pytest.mark.parametrize(("length", "operation"), [(4, "rope_into_cache"), (5, "rope")])
def test_stock_code_writes_a_prompt_only_if_it_is_longer_than_the_window(length, operation):
    ((operations, actual, stock),) = run_both(lambda: DecodeCache([4], capacity=16, limit=32), length)
    assert operations == [operation]
    (layer,), (expected,) = actual.layers, stock.layers
    assert (layer.base, layer.rows) == (expected.base, expected.rows) == (length - 4, 4)
    assert torch.equal(layer.values[:, :, :4], expected.values[:, :, :4])


def test_the_first_tokens_of_a_dynamic_cache_are_written_to_new_tensors():
    steps = list(run_both(dynamic_cache, 5, 1, 2))
    assert [operations for operations, _, _ in steps] == [["rope_into_cache"], ["rope"], ["rope"]]
    (layer,), (expected,) = (cache.layers for cache in steps[-1][1:])
    assert vars(layer).keys() == vars(expected).keys()
    for name, value in vars(expected).items():
        actual = getattr(layer, name)
        assert torch.equal(actual, value) if isinstance(value, torch.Tensor) else actual == value, name
    ((_, first, stock),) = run_both(dynamic_cache, 3)
    assert vars(first.layers[0]).keys() == vars(stock.layers[0]).keys()
    for name in ("keys", "values"):
        tensors = [getattr(cache.layers[0], name) for cache in (first, stock)]
        assert torch.equal(*tensors) and tensors[0].stride() == tensors[1].stride()
    first.reset()
    assert call(first, 2, seed=0, tier="triton")[1] == ["rope_into_cache"]


def test_gradients_of_a_prompt_are_those_of_stock():
    cache = dynamic_cache()
    query, key, value = heads(1, 3, torch.float32, h=H, kv=KV, d=D)
    key = key.clone().requires_grad_()
    (_, keys, _), operations = run(query, key, value, angles(1, 3, D, torch.float32), cache, tier="")
    assert operations == ["rope"] and keys.requires_grad
    assert cache.layers[0].keys is keys


def test_values_of_another_dtype_are_appended_by_stock():
    cache = dynamic_cache()
    query, key, value = heads(1, 3, torch.bfloat16, h=H, kv=KV, d=D)
    _, operations = run(query, key, value.float(), angles(1, 3, D, torch.bfloat16), cache)
    assert operations == ["rope"] and cache.layers[0].values.dtype == torch.float32


@pytest.mark.parametrize("place", ["cache.update", "layer.update", "layer.lazy_initialization"])
def test_a_method_that_was_set_on_an_object_is_called(place):
    cache, calls = dynamic_cache(), []
    owner, _, name = place.partition(".")
    target = cache if owner == "cache" else cache.layers[0]
    method = getattr(target, name)
    setattr(target, name, lambda *args, **kwargs: calls.append(1) or method(*args, **kwargs))
    assert call(cache, 3, seed=0, tier="triton")[1] == ["rope"] and calls == [1]


@pytest.mark.parametrize("name", ["update", "lazy_initialization"])
def test_a_method_that_was_set_on_the_class_is_called(name, monkeypatch):
    cache, calls = dynamic_cache(), []
    method = getattr(DynamicLayer, name)
    monkeypatch.setattr(DynamicLayer, name, lambda *args, **kwargs: calls.append(1) or method(*args, **kwargs))
    assert call(cache, 3, seed=0, tier="triton")[1] == ["rope"] and calls == [1]


@pytest.mark.parametrize("layer", [StaticLayer, DynamicLayer])
def test_a_class_of_layers_that_was_replaced_is_used(layer, monkeypatch):
    class Mine(layer):
        def update(self, *args, **kwargs):
            keys, self.values = super().update(*args, **kwargs)
            return keys, self.values * 2

    Mine.__name__ = layer.__name__
    monkeypatch.setattr(cache_utils, layer.__name__, Mine)
    cache = dynamic_cache() if layer is DynamicLayer else StaticCache(config=config(), max_cache_len=8)
    cache.layers[:] = [Mine()] if layer is DynamicLayer else [Mine(max_cache_len=8)]
    for seed in range(2):
        assert call(cache, 2, seed=seed, tier="triton")[1] == ["rope"]


def test_a_layer_of_a_release_without_a_flag_is_updated_by_stock():
    """Before transformers 4.57, layers have no `is_initialized`."""
    cache = dynamic_cache()
    cache.update(*(torch.ones(1, KV, 1, D, dtype=torch.bfloat16) for _ in range(2)), 0)
    del cache.layers[0].is_initialized
    assert not _may_have_slot(cache, 0) and slot(cache, 0, *[torch.ones(1, KV, 1, D)] * 2, {}) is None


@pytest.mark.parametrize("when", ["before the first check", "after it"])
def test_a_patched_class_whose_name_was_replaced_is_followed(when, monkeypatch):
    monkeypatch.setattr(features, "_watches", {})
    if when == "after it":
        assert features.refuses("dynamic_cache") is None
    calls, update = [], DynamicLayer.update

    @functools.wraps(update)
    def patched(*args, **kwargs):
        calls.append(1)
        return update(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(cache_utils, "DynamicLayer", type("DynamicLayer", (DynamicLayer,), {}))
        features.refuses("dynamic_cache")
    monkeypatch.setattr(DynamicLayer, "update", patched)
    assert call(dynamic_cache(), 3, seed=0, tier="triton")[1] == ["rope"] and calls == [1]


def test_a_subclass_with_the_stock_name_is_followed():
    class Mine(DynamicLayer):
        def update(self, *args, **kwargs):
            keys, values = super().update(*args, **kwargs)
            return keys, values * 2

    Mine.__module__, Mine.__name__ = DynamicLayer.__module__, DynamicLayer.__name__
    cache = dynamic_cache()
    cache.layers[:] = [Mine()]
    assert call(cache, 3, seed=0, tier="triton")[1] == ["rope"]


def one_position(query, key, cos, sin):
    return query, key, cos[:, :1], sin[:, :1]


def one_sine(query, key, cos, sin):
    return query, key, cos, sin[:, :1]


def keys_of_another_dtype(query, key, cos, sin):
    return query, key.float(), cos, sin


@pytest.mark.parametrize("change", [one_position, one_sine, keys_of_another_dtype])
@pytest.mark.parametrize(
    "make",
    [lambda: None, dynamic_cache, decode_cache],
    ids=["none", "dynamic", "recorded"],
)
def test_stock_rotates_other_shapes_and_dtypes(make, change):
    query, key, value = heads(1, 3, torch.bfloat16, h=H, kv=KV, d=D)
    query, key, cos, sin = change(query, key, *angles(1, 3, D, torch.bfloat16))
    expected = apply_rotary_pos_emb(query, key, cos, sin)
    actual, operations = run(query, key, value, (cos, sin), make())
    assert operations == []
    for one, other in zip(actual[:2], expected, strict=True):
        assert torch.equal(one, other)


def test_heads_of_another_dim_raise_stocks_error():
    query, key, value = heads(1, 3, torch.bfloat16, h=H, kv=KV, d=D)
    with pytest.raises(RuntimeError, match="must match the size"):
        run(query, key[..., :4], value, angles(1, 3, D, torch.bfloat16), dynamic_cache())


@pytest.mark.parametrize("make", [dynamic_cache, decode_cache])
def test_values_of_another_shape_are_appended_by_stock(make):
    query, key, value = heads(1, 3, torch.bfloat16, h=H, kv=KV, d=D)
    for other in (value[:, :1], value.repeat(1, 2, 1, 1)):
        (_, _, values), operations = run(query, key, other, angles(1, 3, D, torch.bfloat16), make())
        assert operations == ["rope"] and torch.equal(values, other)


def sliding():
    return DynamicCache(config=MistralConfig(**config().to_dict() | {"sliding_window": 4}))


def another_dynamic_layer():
    cache = dynamic_cache()
    cache.layers[0] = type("Mine", (DynamicLayer,), {})()
    return cache


@pytest.mark.parametrize("make", [sliding, another_dynamic_layer], ids=["sliding", "another layer"])
def test_other_dynamic_layers_are_updated_by_stock(make):
    assert [operations for operations, _, _ in run_both(make, 2, 1)] == [["rope"], ["rope"]]
