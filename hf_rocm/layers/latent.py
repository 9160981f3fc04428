"""Latent attention (MLA): queries, keys and values through narrow projections, with a rotated part that heads share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_rocm.layers.heads import remember
from hf_rocm.layers.project import project, split_heads

Turn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def latent_heads(
    module: Any,
    x: Tensor,
    turn: Turn,
    cache: Any,
    arguments: Mapping[str, Any],
    position_embeddings: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and keys and values with all that the cache holds, for DeepSeek's module names.

    x: [B, S, K]. turn: (queries [B, H, S, R], key [B, 1, S, R]) → both with their positions. arguments: the call's
    keyword arguments. Modules with an `expand_kv` keep the narrow form in the cache, and widen it at every call; the
    others keep keys and values. Returns [B, H, S, D], [B, H, S_k, D] and [B, H, S_k, D_v].
    """
    if module.q_lora_rank is None:
        wide, narrow = project(module, x, "q_proj", "kv_a_proj_with_mqa")
    else:
        q_narrow, narrow = project(module, x, "q_a_proj", "kv_a_proj_with_mqa")
        wide = module.q_b_proj(module.q_a_layernorm(q_narrow))
    (query,) = split_heads((wide,), module.qk_head_dim)
    rotated = module.qk_rope_head_dim
    plain, query_part = query.split((module.qk_nope_head_dim, rotated), dim=-1)
    narrow, key_part = narrow.split((module.kv_lora_rank, rotated), dim=-1)
    narrow = module.kv_a_layernorm(narrow)
    query_part, key_part = turn(query_part, key_part[:, None])
    query = torch.cat((plain, query_part), dim=-1)
    if hasattr(module, "expand_kv"):
        return query, *module.expand_kv(*remember(module, narrow[:, None], key_part, cache, arguments))
    (both,) = split_heads((module.kv_b_proj(narrow),), module.qk_nope_head_dim + module.v_head_dim)
    key, value = both.split((module.qk_nope_head_dim, module.v_head_dim), dim=-1)
    key = torch.cat((key, key_part.expand(-1, key.shape[1], -1, -1)), dim=-1)
    return query, *remember(module, key, value, cache, arguments, position_embeddings)
