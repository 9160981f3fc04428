"""Page tables for sliding layers in batches. In stock, these layers read their keys from rings without page tables."""

from __future__ import annotations

import copy
import gc
import importlib
from importlib.util import find_spec

import pytest
import torch

import hf_rocm
from hf_rocm import ops, patches
from hf_rocm.generation import sliding_pages
from tests.generation.conftest import make
from tests.serving.batching import RELEASE, one_by_one, prompts
from tests.serving.test_flash_provider import KINDS, NAME, attention_operations, batch

pytestmark = [
    pytest.mark.skipif(RELEASE.release < (5, 19), reason="not run: this release stays on sdpa, or has no rings"),
    pytest.mark.skipif(find_spec("flash_attn") is not None, reason="not run: flash-attn is installed and is used"),
]


@pytest.mark.parametrize(("columns", "over_pages"), [(9, True), (3, True), (2, False), (1, False)])
def test_requests_with_more_pages_than_columns_have_the_same_tokens(columns, over_pages, page_tables_on_cpu):
    """A full ring needs three columns: two pages and a slot. With fewer, only requests of one page could use tables."""
    model = make("mistral", sliding_window=8)
    expected = one_by_one(model, prompts())
    hf_rocm.prepare(model, force=True)
    with ops.recording() as routes:
        assert batch(model, page_size=5, num_blocks=800, max_blocks_per_request=columns) == expected
    assert ("paged_attention" in attention_operations(routes)) == over_pages


def test_sliding_and_full_layers_of_gemma_3_share_a_batch(page_tables_on_cpu):
    """Sliding layers have different rotary frequencies from full layers."""
    model = make("gemma3", sliding_window=8, layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2)
    expected = one_by_one(model, prompts())
    hf_rocm.prepare(model, force=True)
    with ops.recording() as routes:
        assert batch(model, page_size=5, num_blocks=800) == expected
    assert attention_operations(routes) == {"varlen_attention", "paged_attention"}


def test_page_tables_of_sliding_layers_are_used_only_by_hf_rocms_functions(page_tables_on_cpu):
    """Other kernels would write a new key after the last one. The changes are undone when the model is restored."""
    gc.collect()
    patches.sweep()
    cache, initialization = (
        importlib.import_module(f"transformers.generation.continuous_batching.{name}")
        for name in ("cache", "initialization")
    )

    def parts():
        cls = cache.PagedAttentionCache
        entries = initialization.group_layers_by_attn_type, *cache.ATTN_TYPE_TO_ALLOCATOR.values()
        return [*map(id, entries), id(cls._infer_max_decode_fast_path_length)]

    stock = parts()
    model = hf_rocm.prepare(make("mistral", sliding_window=8), force=True)
    batch(model)
    assert all(part != before for part, before in zip(parts()[::2], stock[::2], strict=True))
    config = copy.deepcopy(model.config)
    config._attn_implementation = "kernels-community/flash-attn2"
    assert set(initialization.group_layers_by_attn_type(config)) == {"sliding_attention"}
    sizes = {"index": 0, "layer_indices": [0], "num_key_value_heads": 1, "cache_dtype": torch.float32, "page_size": 8}
    allocator = cache.ATTN_TYPE_TO_ALLOCATOR["sliding_attention"]
    assert not allocator(config=config, allow_block_sharing=False, **sizes).supports_block_table
    config._attn_implementation = NAME
    assert allocator(config=config, allow_block_sharing=False, **sizes).supports_block_table
    assert set(initialization.group_layers_by_attn_type(config)) == {"full_attention"}
    hf_rocm.restore(model)
    assert parts() == stock


def test_without_page_tables_sliding_layers_gather_their_keys(page_tables_on_cpu, monkeypatch):
    """If a part of transformers has changed, batches of sliding models gather their keys as in stock transformers."""
    monkeypatch.setattr(sliding_pages, "refused", lambda: "a reason")
    model = make("gpt_oss", **KINDS["gpt_oss"])
    expected = one_by_one(model, prompts())
    hf_rocm.prepare(model, force=True)
    with ops.recording() as routes:
        assert batch(model) == expected
    assert attention_operations(routes) == {"varlen_attention"}
    assert "its decode steps gather their keys, because a reason" in hf_rocm.explain(model).details()


def test_a_function_that_is_replaced_between_batches_is_called(page_tables_on_cpu, monkeypatch):
    model = make("mistral", sliding_window=8)
    expected = one_by_one(model, prompts())
    hf_rocm.prepare(model, force=True)
    assert batch(model) == expected
    allocators = importlib.import_module("transformers.generation.continuous_batching.cache_allocators")
    original, calls = allocators.SlidingAttentionCacheAllocator.get_read_indices, []

    def get_read_indices(self, *args, **kwargs):
        calls.append(self)
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch, ops.recording() as routes:
        patch.setattr(allocators.SlidingAttentionCacheAllocator, "get_read_indices", get_read_indices)
        assert batch(model) == expected
    assert attention_operations(routes) == {"varlen_attention"} and len(calls) > len(prompts())
    with ops.recording() as routes:
        assert batch(model) == expected
    assert "paged_attention" in attention_operations(routes)
