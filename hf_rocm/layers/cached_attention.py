"""From projected heads to the output of attention: norms, rotary positions, the cache, and attention itself.

In a recorded step of one or a few tokens, one kernel can compute all of these. Kernels that write keys and values
replace `update` only in caches whose `update` is known to do nothing else: transformers' static layers and empty
dynamic layers, checked by the digests of their definitions, and the cache of recorded decode steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, compiler

from hf_rocm import ops
from hf_rocm.layers.attention import attached_rows, normed_heads, visible_keys
from hf_rocm.layers.decoder import norm_pair
from hf_rocm.ops.attend_into_cache import one_kernel as one_step_kernel
from hf_rocm.ops.attention import user_serves
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.rope_into_cache import one_kernel
from hf_rocm.ops.specs.attention import FEW_QUERIES
from hf_rocm.overlay.replacements import origin

_HOME = "transformers.cache_utils"
# The methods of a layer that write keys and values.
_UPDATING = frozenset(("update", "lazy_initialization"))


def attend(
    module: Any,
    stock: Callable[..., Any],
    heads: tuple[Tensor, ...],
    position_embeddings: tuple[Tensor, Tensor] | None,
    cache: Any,
    mask: Tensor | None,
    arguments: Mapping[str, Any],
    *,
    scale: float,
    norms: tuple[str, ...] = (),
    once: bool = False,
    partial: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute everything between an attention layer's projections, for models whose rotary function rotates halves.

    These are the norms of queries and keys, the rotation, the update of the cache, and attention over all keys.

    stock: the model's own rotary function, which runs if the tensors' dtype differs from that of cos and sin, and with
    `once` if no kernel writes to the cache. heads: query [B, H, S, D], key [B, Hkv, S, D] and value [B, Hkv, S, D_v].
    position_embeddings: cos and sin, [B | 1, S, R], or None in a layer without rotary positions. cache: the model's
    cache, or None. mask, arguments: the attention mask and the other keyword arguments of the call. scale, softcap,
    sinks: see `ops.attention`. norms: the children that normalise queries and keys over the head dim; children that the
    module lacks are skipped. once: cos and sin contain each angle once, [B | 1, S, R / 2], as the model's function
    takes them. partial: see `rotate`. window: the layer's sliding window. Returns (output [B, S, H · D_v], weights);
    weights is None, as from SDPA, unless the eager tier computes attention.
    """
    query, key, value = heads
    few = query.shape[2] <= FEW_QUERIES
    if few and mask is not None and cache is not None and position_embeddings is not None:
        tensors = query, key, value, position_embeddings
        step = _in_one_kernel(module, *tensors, cache, mask, arguments, norms, once, scale, softcap, sinks)
        if step is not None:
            return step.flatten(2), None
    keywords: dict[str, Any] = {"norms": norms, "once": once, "partial": partial}
    query, key, value = rotate_and_update_cache(
        module, stock, query, key, value, position_embeddings, cache, arguments, **keywords
    )
    key, value, seen = visible_keys(
        module, query, key, value, mask, arguments, window=window, softcap=softcap, sinks=sinks
    )
    output, weights = ops.attention(query, key, value, scale=scale, softcap=softcap, sinks=sinks, **seen)
    return output.flatten(2), weights


def _in_one_kernel(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    cache: Any,
    mask: Tensor,
    arguments: Mapping[str, Any],
    norms: tuple[str, ...],
    once: bool,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor | None:
    """Return the output [B, S, H, D_v] of a step of S tokens, or None if a single kernel can't compute this call."""
    cos = position_embeddings[0]
    if compiling() or compiler._is_compiling_flag or value.dtype != query.dtype:
        return None
    seen = attached_rows(mask)
    if seen is None or seen.key_lengths.numel() > 1 or seen.key_ends is not None:
        return None
    rows = slot(cache, module.layer_idx, key, value, arguments)
    if rows is None or rows.position is None or rows.position.ndim == 0:
        return None
    if mask.shape[2:] != (query.shape[2], rows.keys.shape[2]) or not _match(query, key, *position_embeddings):
        return None
    terms = norm_pair(module, norms, query)
    if terms is False or user_serves(
        query, rows.keys, rows.values, mask.dtype, softcap=softcap is not None, sinks=sinks is not None
    ):
        return None
    keywords: dict[str, Any] = {"starts": seen.key_starts, "window": seen.window, "softcap": softcap, "sinks": sinks}
    if not one_step_kernel(query, key, value, cos, **keywords, once=once, norms=terms):
        return None
    keys, values, position, written = rows
    keywords |= {"keys": keys, "values": values, "position": position, "scale": scale, "once": once, "norms": terms}
    output = ops.attend_into_cache(query, key, value, *position_embeddings, seen.key_lengths, **keywords)
    if written is not None:
        written()
    return output


def rotate(
    stock: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *,
    partial: bool = False,
) -> tuple[Tensor, Tensor]:
    """Apply rotary position embeddings, for models whose function rotates halves in the tensors' own dtype.

    stock: the model's own function, used if the tensors' dtype differs from that of cos and sin, or for other shapes,
    which it may broadcast. query: [B, H, S, D]. key: [B, Hkv, S, D]. position_embeddings: cos and sin, [B | 1, S, R],
    R ≤ D. partial: the model's function takes only the R rotated dims. Returns (query, key).
    """
    cos, sin = position_embeddings
    # Symbolic sizes are not compared, because every comparison would restrict the compiled code.
    traced = compiling() or compiler._is_compiling_flag
    if cos.dtype == query.dtype if traced else _match(query, key, cos, sin):
        return ops.rope(query, key, cos, sin)
    width = cos.shape[-1] if partial else query.shape[-1]
    rotated: tuple[Tensor, Tensor] = stock(query[..., :width], key[..., :width], cos, sin)
    if not partial:
        return rotated
    return torch.cat((rotated[0], query[..., width:]), dim=-1), torch.cat((rotated[1], key[..., width:]), dim=-1)


def _match(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether keys and angles have the dtype and the sizes that the kernels derive from the queries."""
    b, _, s, d = query.shape
    key_b, _, key_s, key_d = key.shape
    size = cos.shape
    if (key_b, key_s, key_d) != (b, s, d) or len(size) != 3 or size[1] != s or size != sin.shape:
        return False
    return (size[0] == 1 or size[0] == b) and query.dtype == key.dtype == cos.dtype == sin.dtype


def rotate_and_update_cache(
    module: Any,
    stock: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None,
    cache: Any,
    arguments: Mapping[str, Any],
    *,
    norms: tuple[str, ...] = (),
    once: bool = False,
    partial: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the norms, `rotate` and `update_cache`, in one kernel where the cache's rows are known in advance.

    query: [B, H, S, D]. key: [B, Hkv, S, D]. value: [B, Hkv, S, D_v]. The other arguments are those of `attend`.
    Returns (query, all keys, all values).
    """
    if position_embeddings is None:
        query, key = normed_heads(module, (query, key), norms)
        return query, *update_cache(module, key, value, cache, arguments)
    cos = position_embeddings[0]
    traced = compiling() or compiler._is_compiling_flag
    may_have_slot = cache is not None and not traced and _may_have_slot(cache, module.layer_idx)
    if may_have_slot and _match(query, key, *position_embeddings):
        rows = slot(cache, module.layer_idx, key, value, arguments)
        if rows is not None:
            terms = norm_pair(module, norms, query)
            in_one_kernel = terms is not False and one_kernel(
                query, key, value, cos, rows.position, once=once, norms=terms
            )
            if norms and not in_one_kernel:
                query, key = normed_heads(module, (query, key), norms)
                norms, terms = (), None
                # a stock norm may promote the dtype
                in_one_kernel = key.dtype == value.dtype and one_kernel(
                    query, key, value, cos, rows.position, once=once
                )
            if in_one_kernel and terms is not False:
                keys, values, position, written = rows
                target: dict[str, Any] = {"keys": keys, "values": values, "position": position}
                query = ops.rope_into_cache(query, key, value, *position_embeddings, **target, once=once, norms=terms)
                if written is not None:
                    written()
                return query, keys, values
        # Free tensors that were created for the first keys and values.
        rows = None
    query, key = normed_heads(module, (query, key), norms)
    if once:
        query, key = stock(query, key, *position_embeddings)
    else:
        query, key = rotate(stock, query, key, position_embeddings, partial=partial)
    return query, *update_cache(module, key, value, cache, arguments, position_embeddings)


def _may_have_slot(cache: Any, index: int) -> bool:
    """Return whether `slot` may return rows of this cache. Checks only types, so that it is fast."""
    if hasattr(type(cache), "_hf_rocm_slot"):
        return True
    layers = getattr(cache, "layers", ())
    if index >= len(layers):
        return False
    layer = layers[index]
    kind = _stock_kind(layer)
    return kind == "StaticLayer" or (kind == "DynamicLayer" and not getattr(layer, "is_initialized", True))


def _stock_kind(layer: Any) -> str | None:
    """Return the name of the layer's class if transformers defines it, also if the class was replaced afterwards."""
    kind = type(layer)
    return kind.__name__ if kind.__module__ == _HOME else None


def update_cache(
    module: Any,
    key: Tensor,
    value: Tensor,
    cache: Any,
    arguments: Mapping[str, Any],
    position_embeddings: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Append this call's keys and values to the cache, if there is one. Returns all keys and values.

    key: [B, Hkv, S, D]. value: [B, Hkv, S, D_v]. arguments: the call's keyword arguments. Up to transformers 5.3 they
    include `cache_position`, which is passed to the cache with cos and sin, as in the stock layers.
    """
    if cache is None:
        return key, value
    position = arguments.get("cache_position")
    cached: tuple[Tensor, Tensor]
    if position is None:
        cached = cache.update(key, value, module.layer_idx)
    else:
        details = {"cache_position": position}
        if position_embeddings is not None:
            details["cos"], details["sin"] = position_embeddings
        cached = cache.update(key, value, module.layer_idx, details)
    return cached


class Slot(NamedTuple):
    """The tensors of a cache layer, and the rows to which a call writes.

    keys: [B, Hkv, L, D]; values: [B, Hkv, L, D_v]. position: the rows [S], or a scalar with the first row, which
    `ops.rope_into_cache` advances; None: rows 0 … S − 1. written: a function to call after the write, or None.
    """

    keys: Tensor
    values: Tensor
    position: Tensor | None
    written: Callable[[], None] | None = None


def slot(cache: Any, index: int, key: Tensor, value: Tensor, arguments: Mapping[str, Any]) -> Slot | None:
    """Return the rows for key [B, Hkv, S, D] and value [B, Hkv, S, D_v] of layer `index`, or None if `update` must run.

    arguments: the call's keyword arguments. Writes no keys or values.
    """
    own = getattr(type(cache), "_hf_rocm_slot", None)
    rows: Slot | None
    rows = _stock_rows(cache, index, key, value, arguments) if own is None else own(cache, index, key, value)
    if rows is None or not (_fits(rows.keys, key) and _fits(rows.values, value)):
        return None
    # Stock appends any values; the kernel writes one value for every key.
    return rows if key.shape[:3] == value.shape[:3] else None


def _stock_rows(cache: Any, index: int, key: Tensor, value: Tensor, arguments: Mapping[str, Any]) -> Slot | None:
    """Return the rows of a layer of transformers' own caches (from 4.56 on), or None."""
    layers = getattr(cache, "layers", None)
    # before 4.56 a cache could offload without this attribute
    if not layers or index >= len(layers) or getattr(cache, "offloading", True):
        return None
    layer = layers[index]
    kind = _stock_kind(layer)
    if kind == "StaticLayer":
        return _static(layer, key, arguments) if _is_stock(cache, layer, "static_cache") else None
    if kind == "DynamicLayer":
        return _empty(layer, key, value) if _is_stock(cache, layer, "dynamic_cache") else None
    return None


def _static(layer: Any, key: Tensor, arguments: Mapping[str, Any]) -> Slot | None:
    """Return the rows of a layer without a sliding window in a static cache, or None."""
    if layer.keys is None:
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


def _empty(layer: Any, key: Tensor, value: Tensor) -> Slot | None:
    """Return new tensors for the first keys and values of a layer in a dynamic cache (from 4.57 on), or None."""
    if getattr(layer, "is_initialized", True) or not key.numel():
        return None
    if key.dtype != value.dtype or key.device != value.device:
        return None
    keys, values = key.new_empty(key.shape), value.new_empty(value.shape)

    def written() -> None:
        layer.dtype, layer.device = key.dtype, key.device
        layer.keys, layer.values, layer.is_initialized = keys, values, True

    return Slot(keys, values, None, written)


def _is_stock(cache: Any, layer: Any, feature: str) -> bool:
    """Return whether the cache updates this layer as transformers' own code does."""
    from hf_rocm import features

    # Methods that user code has set on the objects.
    own = "update" in vars(cache) or not _UPDATING.isdisjoint(vars(layer))
    stock = getattr(sys.modules.get(_HOME), "Cache", None)
    if own or stock is None or getattr(type(cache), "update", None) is not stock.update:
        return False
    # The digests belong to the class that transformers defines now, which may not be the class of the layer.
    methods = [getattr(type(layer), name, None) for name in _UPDATING]
    if not all(isinstance(method, FunctionType) and origin(method) == _HOME for method in methods):
        return False
    return features.refuses(feature) is None


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
