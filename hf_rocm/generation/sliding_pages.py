"""Page tables for sliding layers in continuous batching, so that their decode steps read the pages in place.

transformers stores the keys of a sliding layer in a ring buffer: the key at position p is in slot p % window of the
request's pages. flash-attn writes a new key after the last one, which is wrong in a full ring buffer, so transformers
uses no page tables for a model with a sliding layer: it gathers the keys of every request at every step. hf_rocm's
attention can write the key to any slot. All keys in the ring buffer are in the window of the single query, so their
order is irrelevant.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Hashable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hf_rocm import features, patches
from hf_rocm.layers.flash_functions import RingPages
from hf_rocm.patches import Change, Entry

_FEATURE = "sliding_pages"
_BATCHING = "transformers.generation.continuous_batching"
_ALLOCATORS = f"{_BATCHING}.cache_allocators"

# Types of layers in transformers.
SLIDING, FULL = "sliding_attention", "full_attention"

Served = Callable[[Any], bool]


def refused() -> str | None:
    """Return the reason why this process has no page tables for sliding layers, as a sentence, or None."""
    if find_spec(_ALLOCATORS) is None:
        return "transformers 5.17 and earlier manage the pages of sliding layers differently"
    return features.refuses(_FEATURE)


def has_sliding_layers(config: Any) -> bool:
    """Return whether a model with this config has sliding layers."""
    kinds = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) is not None if kinds is None else SLIDING in kinds


def provide(user: Any, served: Served, *, key: Hashable) -> None:
    """Provide page tables for the sliding layers of all batches whose config `served` accepts.

    served: returns whether hf_rocm provides the attention implementation that is selected in a config. user, key: the
    user and the key of the changes, see `patches`.
    """
    if refused() is not None:
        return
    cache, initialization = (importlib.import_module(f"{_BATCHING}.{name}") for name in ("cache", "initialization"))
    patches.apply(
        Entry(vars(initialization), "group_layers_by_attn_type", partial(_one_group, served), key=key),
        Entry(cache.ATTN_TYPE_TO_ALLOCATOR, SLIDING, partial(_allocator, served), key=key),
        Change(cache.PagedAttentionCache, "_infer_max_decode_fast_path_length", _longest, key=key),
        user=user,
    )


def _one_group(served: Served, change: Change) -> Callable[[Any], dict[str, list[int]]]:
    """Return a replacement for the function whose result determines whether a model uses page tables."""

    def group_layers_by_attn_type(config: Any) -> dict[str, list[int]]:
        groups: dict[str, list[int]] = change.original(config)
        if not _active(change, served, config):
            return groups
        return {FULL if kind == SLIDING else kind: layers for kind, layers in groups.items()}

    return group_layers_by_attn_type


def _allocator(served: Served, change: Change) -> type:
    """Return a subclass of transformers' class for the pages of sliding layers that provides page tables."""
    stock: Any = change.current()

    class RingAllocator(stock):
        def __init__(self, *, config: Any, **sizes: Any) -> None:
            super().__init__(config=config, **sizes)
            self.supports_block_table = _active(change, served, config)

        def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: Tensor) -> None:
            """Fill the row of a request: its pages, then −1, and the slot of the new key in the last column.

            A row has too few columns only while transformers warms up, and those results are not used.
            """
            columns, stride = len(block_table) - 1, self.block_physical_stride // self.tokens_per_page
            pages = [block * stride for block in self.block_table[request_id][:columns]]
            slot = min(past_length % self.sliding_window, columns * self.tokens_per_page - 1)
            row = torch.tensor([*pages, *[-1] * (columns - len(pages)), slot], dtype=block_table.dtype)
            block_table.copy_(row, non_blocking=True)

        def get_cache_for_block_table(self, layer_idx: int) -> tuple[RingPages, Tensor]:
            keys, values = self._kv_page_views[layer_idx]
            return RingPages(keys, _pages(self)), values

    return RingAllocator


def _active(change: Change, served: Served, config: Any) -> bool:
    """Return whether a batch that begins now uses page tables.

    `refused` is called again, because other code may have patched transformers since `provide`.
    """
    return change.live and served(config) and refused() is None


def _longest(change: Change) -> Callable[[Any], int]:
    """Return a replacement for the method that returns the maximum number of keys of a request with page tables."""

    def _infer_max_decode_fast_path_length(self: Any) -> int:
        stock: int = change.call_of(self)()
        if not stock:
            return stock
        limits = []
        for kind, allocator in self.cache_allocators.items():
            # The last column contains the slot.
            columns = self.max_blocks_per_request - (kind == SLIDING)
            if kind != SLIDING or _pages(allocator) > columns:
                limits.append(columns * allocator.tokens_per_page)
        # The default means no limit: a ring buffer does not grow with the request.
        return min(limits, default=sys.maxsize)

    return _infer_max_decode_fast_path_length


def _pages(allocator: Any) -> int:
    return -(-allocator.sliding_window // allocator.tokens_per_page)
