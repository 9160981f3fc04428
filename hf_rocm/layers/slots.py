"""Find the rows of a static cache for a call's keys and values, so that the kernel that rotates the keys writes both.

This replaces `update` only in caches where it is known to write keys and values and to do nothing else: transformers'
static layers, checked by the digests of their definitions, and the cache of recorded decode steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Slot(NamedTuple):
    """Rows of a cache.

    keys: [B, Hkv, L, D]; values: [B, Hkv, L, D_v]. position: the rows [S], or a scalar with the first row, which
    `ops.rope_into_cache` advances. written: a function to call after the write, or None.
    """

    keys: Tensor
    values: Tensor
    position: Tensor
    written: Callable[[], None] | None = None


def slot(cache: Any, index: int, key: Tensor, value: Tensor, arguments: Mapping[str, Any]) -> Slot | None:
    """Return the rows for key [B, Hkv, S, D] and value [B, Hkv, S, D_v] of layer `index`, or None if `update` must run.

    arguments: the call's keyword arguments. Changes nothing.
    """
    own = getattr(type(cache), "_hf_rocm_slot", None)
    rows: Slot | None = _static(cache, index, key, arguments) if own is None else own(cache, index, key.shape[2])
    if rows is None or not (_fits(rows.keys, key) and _fits(rows.values, value)):
        return None
    return rows


def _static(cache: Any, index: int, key: Tensor, arguments: Mapping[str, Any]) -> Slot | None:
    """Return rows of transformers' own static cache, from 4.56 on, in a layer without a sliding window."""
    home = sys.modules.get("transformers.cache_utils")
    kind = getattr(home, "StaticLayer", None)
    layers = getattr(cache, "layers", None)
    if kind is None or not layers or index >= len(layers) or type(layers[index]) is not kind:
        return None
    layer = layers[index]
    # before 4.56 a cache could offload without this attribute
    if layer.keys is None or getattr(cache, "offloading", True) or not _is_stock(type(cache), home):
        return None
    counter = getattr(layer, "cumulative_length", None)
    if counter is not None:
        if counter.device != key.device:
            return None
        return Slot(layer.keys, layer.values, counter if counter.ndim == 0 else counter[0])
    position = arguments.get("cache_position")
    if position is None or position.shape != key.shape[2:3] or position.device != key.device:
        return None
    return Slot(layer.keys, layer.values, position)


def _is_stock(kind: type, home: Any) -> bool:
    """Return whether this cache updates its layers as transformers does."""
    from hf_rocm import features

    return getattr(kind, "update", None) is home.Cache.update and features.refuses("static_cache") is None


def _fits(rows: Tensor, new: Tensor) -> bool:
    """Return whether new [B, heads, S, D] can be written to rows [B, heads, L, D] without conversion."""
    return (
        type(rows) is torch.Tensor
        and rows.dtype == new.dtype
        and rows.device == new.device
        and rows.shape[:2] == new.shape[:2]
        and rows.shape[3] == new.shape[3]
        and rows.stride(3) == 1
    )
