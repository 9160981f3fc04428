"""Attention of encoder-decoder models: a layer attends to its own input or to the encoder's output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_rocm.layers.attention import heads, split_heads
from hf_rocm.layers.cached_attention import update_cache
from hf_rocm.layers.release import before

# Before 4.54 these layers returned the cache as a third value.
_WITH_CACHE = before("4.54")


def encoder_decoder(
    module: Any,
    x: Tensor,
    source: Tensor | None,
    cache: Any,
    arguments: Mapping[str, Any],
    names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
    head_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the queries of x, and the keys and values of x or of the encoder's output.

    With a pair of caches, the keys and values of the encoder's output are computed only in the first step.

    x: [B, S, K]. source: the encoder's output [B, S_e, K] in cross-attention, else None. cache: None, a plain cache,
    or transformers' pair of caches. arguments: the call's keyword arguments. Returns query [B, H, S, D], key
    [B, H, S_k, D] and value [B, H, S_k, D].
    """
    size = module.head_dim if head_dim is None else head_dim
    paired = hasattr(cache, "self_attention_cache")
    if source is None:
        query, key, value = heads(module, x, *names, head_dim=size)
        self_cache = cache.self_attention_cache if paired else cache
        return query, *update_cache(module, key, value, self_cache, arguments)
    query_name, *others = names
    (query,) = split_heads((module._modules[query_name](x),), size)
    cross_cache = cache.cross_attention_cache if paired else cache
    if paired and cache.is_updated.get(module.layer_idx):
        return query, *_cached(cross_cache, module.layer_idx)
    key, value = split_heads(tuple(module._modules[name](source) for name in others), size)
    # Pass no positions, because the encoder's positions are not the decoder's.
    key, value = update_cache(module, key, value, cross_cache, {})
    if paired:
        cache.is_updated[module.layer_idx] = True
    return query, key, value


def pack_outputs(output: Tensor, weights: Tensor | None, cache: Any) -> tuple[Any, ...]:
    """Return the outputs of an encoder-decoder model's attention layer as the installed transformers expects them."""
    return (output, weights, cache) if _WITH_CACHE else (output, weights)


def _cached(cache: Any, layer: int) -> tuple[Tensor, Tensor]:
    if hasattr(cache, "layers"):
        return cache.layers[layer].keys, cache.layers[layer].values
    return cache.key_cache[layer], cache.value_cache[layer]
