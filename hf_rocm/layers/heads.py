"""What comes before attention in most models: heads, their norms, rotary positions, the cache."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from hf_rocm import ops
from hf_rocm.layers.project import project
from hf_rocm.layers.slots import slot
from hf_rocm.ops.rope_into_cache import one_kernel


def heads(
    module: Any, x: Tensor, *names: str, norms: tuple[str, ...] = (), head_dim: int | None = None
) -> tuple[Tensor, ...]:
    """The named linear children's outputs by head.

    x: [B, S, K]. norms: the children that normalise the first outputs over a head's dims, in order; one that the
    module doesn't have is left out. head_dim: `module.head_dim` unless given. Returns a [B, heads, S, D] for each name,
    a view.
    """
    parts = list(project(module, x, *names, head_dim=module.head_dim if head_dim is None else head_dim))
    for index, name in enumerate(norms):
        norm = module._modules.get(name)
        if norm is not None:
            parts[index] = norm(parts[index].transpose(1, 2)).transpose(1, 2)
    return tuple(parts)


def rotate(
    stock: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *,
    partial: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotary positions, for models whose function rotates halves in the tensors' own dtype.

    stock: the model's own function, which runs if the user or a kernel library put another in its place. query:
    [B, H, S, D]; key: [B, Hkv, S, D]; position_embeddings: cos and sin, [B | 1, S, R], R ≤ D. partial: that function
    is to be given R dims only. Returns (query, key).
    """
    cos, sin = position_embeddings
    other = _put_in_place_of(stock)
    if other is None and cos.dtype == query.dtype:
        return ops.rope(query, key, cos, sin)
    width = cos.shape[-1] if partial else query.shape[-1]
    rotated: tuple[Tensor, Tensor] = (other or stock)(query[..., :width], key[..., :width], cos, sin)
    if not partial:
        return rotated
    return torch.cat((rotated[0], query[..., width:]), dim=-1), torch.cat((rotated[1], key[..., width:]), dim=-1)


def rotate_and_remember(
    module: Any,
    stock: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    cache: Any,
    arguments: Mapping[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """`rotate`, then `remember`; one kernel for both where the cache's rows are known beforehand.

    Arguments as theirs. Returns (query, all keys, all values).
    """
    cos = position_embeddings[0]
    if cache is not None and not is_compiling() and cos.dtype == query.dtype and _put_in_place_of(stock) is None:
        found = slot(cache, module.layer_idx, key, value, arguments)
        if found is not None and one_kernel(query, key, value, cos, found.position):
            keys, values, position, written = found
            query = ops.rope_into_cache(
                query, key, value, *position_embeddings, keys=keys, values=values, position=position
            )
            if written is not None:
                written()
            return query, keys, values
    query, key = rotate(stock, query, key, position_embeddings)
    return query, *remember(module, key, value, cache, arguments, position_embeddings)


_MODELS = "transformers.models."

# The namespace of the model file that each function came from; None for what is no plain function of one.
_homes: dict[object, dict[str, Any] | None] = {}


def _put_in_place_of(stock: Callable[..., Any]) -> Callable[..., Any] | None:
    """What the user or a library put in the place of the model file's function, or None where that still stands."""
    if is_compiling():
        return None if type(stock) is FunctionType and stock.__module__.startswith(_MODELS) else stock
    if stock not in _homes:
        ours = type(stock) is FunctionType and stock.__module__.startswith(_MODELS)
        _homes[stock] = vars(sys.modules[stock.__module__]) if ours else None
    home = _homes[stock]
    if home is None:
        return stock
    found: Callable[..., Any] = home.get(stock.__name__, stock)
    return None if found is stock else found


def remember(
    module: Any,
    key: Tensor,
    value: Tensor,
    cache: Any,
    arguments: Mapping[str, Any],
    position_embeddings: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Put this call's keys and values into the cache, if there is one; returns all that it holds.

    key: [B, Hkv, S, D]; value: [B, Hkv, S, D_v]. arguments: the call's keyword arguments. Up to transformers 5.3 they
    have a `cache_position`, which the cache is told, with cos and sin, as the stock layers do.
    """
    if cache is None:
        return key, value
    place = arguments.get("cache_position")
    kept: tuple[Tensor, Tensor]
    if place is None:
        kept = cache.update(key, value, module.layer_idx)
    else:
        told = {"cache_position": place}
        if position_embeddings is not None:
            told["cos"], told["sin"] = position_embeddings
        kept = cache.update(key, value, module.layer_idx, told)
    return kept
