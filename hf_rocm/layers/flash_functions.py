"""The functions of the flash-attn package that transformers calls, implemented with the operations in `hf_rocm.ops`.

transformers reads the parameters of these functions to determine what an implementation supports, so the names are
those of flash-attn. Parameters that transformers never passes are omitted.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm import ops
from hf_rocm.errors import OptionError
from hf_rocm.ops.specs.attention import AttentionTerms

# The numbers of keys to the left and to the right of a query's own position; None or −1: no limit.
Window = tuple[int | None, int | None]


class RingPages(NamedTuple):
    """The key pages of sliding layers. The pages of a row form a ring buffer of the keys in its window, in any order.

    With these pages, `flash_attn_with_kvcache` expects a block table whose last column contains the slot of each row's
    new key. size: the number of pages of a full ring.
    """

    keys: Tensor
    size: int


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention of [B, S_q, H, D] over [B, S_k, Hkv, D]. s_aux: sinks, [H]. Returns [B, S_q, H, D_v]."""
    _no_dropout(dropout_p)
    dense = [part.transpose(1, 2) for part in (q, k, v)]
    terms = _terms(q, softmax_scale, causal, window_size, softcap, s_aux)
    if not causal and terms["window"] is not None:
        terms["mask"], terms["window"] = _around(q.shape[1], k.shape[1], window_size, q.device), None
    return ops.attention(*dense, **terms)[0]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """`flash_attn_func` for packed sequences: [T_q, H, D] over [T_k, Hkv, D]. Returns [T_q, H, D_v]."""
    _no_dropout(dropout_p)
    terms = _terms(q, softmax_scale, causal, window_size, softcap, s_aux)
    if not causal and terms["window"] is not None:
        return _one_by_one(q, k, v, cu_seqlens_q, cu_seqlens_k, terms, window_size)
    return ops.varlen_attention(
        q,
        k,
        v,
        cu_seqlens_q.to(torch.int32),
        cu_seqlens_k.to(torch.int32),
        longest_query=int(max_seqlen_q),
        longest_key=int(max_seqlen_k),
        scale=terms["scale"],
        causal=causal,
        window=terms["window"],
        softcap=terms["softcap"],
        sinks=s_aux,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor | RingPages,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Append k and v, [B, S_q, Hkv, D], if given, to the pages of each row, and attend causally.

    k_cache, v_cache: [pages, page size, Hkv, D]. cache_seqlens: [B], the number of keys before those of the queries;
    −1 for a row without a request. block_table: [B, N], or [B, N + 1] with `RingPages`. Returns [B, S_q, H, D_v].
    """
    terms = _terms(q, softmax_scale, True, window_size, softcap, s_aux)
    slots = None
    if isinstance(k_cache, RingPages):
        slots, block_table, terms["window"] = block_table[:, -1], block_table[:, :-1][:, : k_cache.size], None
        k_cache = k_cache.keys
    new = [None if part is None else part.transpose(1, 2) for part in (k, v)]
    return ops.paged_attention(
        q.transpose(1, 2),
        k_cache,
        v_cache,
        block_table,
        (cache_seqlens + q.shape[1]).to(torch.int32),
        *new,
        slots=slots,
        scale=terms["scale"],
        window=terms["window"],
        softcap=terms["softcap"],
        sinks=terms["sinks"],
    )


def _terms(
    query: Tensor, scale: float | None, causal: bool, window: Window, softcap: float | None, sinks: Tensor | None
) -> AttentionTerms:
    left = window[0]
    if not causal and (left is None or left < 0):
        # `_around` uses both sides.
        left = window[1]
    return AttentionTerms(
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        causal=causal,
        mask=None,
        window=None if left is None or left < 0 else left + 1,
        softcap=softcap or None,
        sinks=sinks,
    )


def _around(s_q: int, s_k: int, window: Window, device: torch.device) -> Tensor:
    """Return a bool mask [1, 1, S_q, S_k]: the keys within the window on both sides of the query's position."""
    distance = torch.arange(s_k, device=device) - torch.arange(s_k - s_q, s_k, device=device)[:, None]
    left, right = (s_k if side is None or side < 0 else side for side in window)
    return ((distance >= -left) & (distance <= right))[None, None]


def _one_by_one(
    q: Tensor, k: Tensor, v: Tensor, query_ends: Tensor, key_ends: Tensor, terms: AttentionTerms, window: Window
) -> Tensor:
    """Attend within every packed sequence with a mask, because no operation supports a window on both sides."""
    outputs = []
    for (a, b), (c, d) in zip(pairwise(query_ends.tolist()), pairwise(key_ends.tolist()), strict=True):
        one = [part.transpose(0, 1)[None] for part in (q[a:b], k[c:d], v[c:d])]
        terms["mask"], terms["window"] = _around(b - a, d - c, window, q.device), None
        outputs.append(ops.attention(*one, **terms)[0][0])
    outputs.append(q.new_zeros(len(q) - sum(map(len, outputs)), q.shape[1], v.shape[2]))
    return torch.cat(outputs)


def _no_dropout(probability: Any) -> None:
    if probability:
        raise OptionError(
            f"hf_rocm's flash attention does not support dropout, but the model uses {probability}",
            hint='set attention_dropout=0 in the config, or use attn_implementation="sdpa"',
        )
