"""Multi-head latent attention (MLA): low-rank projections, and a rotated part of the key that all heads share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_rocm.layers.attention import project, split_heads
from hf_rocm.layers.cached_attention import update_cache
from hf_rocm.layers.norm import PrenormResidual

Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def latent_heads(
    module: Any,
    x: Tensor,
    rotate: Rotate,
    cache: Any,
    arguments: Mapping[str, Any],
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    *,
    fused: PrenormResidual | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute queries, and all keys and values including the cached ones, for modules with DeepSeek's attribute names.

    x: [B, S, K]. rotate: applies rotary embeddings to (queries [B, H, S, R], key [B, 1, S, R]). arguments: the call's
    keyword arguments. position_embeddings: cos and sin, which are passed only to the cache; see `update_cache`. fused:
    as in `attention.heads`. Modules with an `expand_kv` method cache the latent form and expand it on every call; other
    modules cache keys and values.
    Returns query [B, H, S, D], key [B, H, S_k, D], value [B, H, S_k, D_v].
    """
    if module.q_lora_rank is None:
        wide, narrow = project(module, x, "q_proj", "kv_a_proj_with_mqa", fused=fused)
    else:
        q_narrow, narrow = project(module, x, "q_a_proj", "kv_a_proj_with_mqa", fused=fused)
        wide = module.q_b_proj(module.q_a_layernorm(q_narrow))
    (query,) = split_heads((wide,), module.qk_head_dim)
    rotated = module.qk_rope_head_dim
    plain, query_part = query.split((module.qk_nope_head_dim, rotated), dim=-1)
    narrow, key_part = narrow.split((module.kv_lora_rank, rotated), dim=-1)
    narrow = module.kv_a_layernorm(narrow)
    query_part, key_part = rotate(query_part, key_part[:, None])
    query = torch.cat((plain, query_part), dim=-1)
    if hasattr(module, "expand_kv"):
        return query, *module.expand_kv(*update_cache(module, narrow[:, None], key_part, cache, arguments))
    (both,) = split_heads((module.kv_b_proj(narrow),), module.qk_nope_head_dim + module.v_head_dim)
    key, value = both.split((module.qk_nope_head_dim, module.v_head_dim), dim=-1)
    key = torch.cat((key, key_part.expand(-1, key.shape[1], -1, -1)), dim=-1)
    return query, *update_cache(module, key, value, cache, arguments, position_embeddings)
