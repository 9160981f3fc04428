"""attention: softmax(q kᵀ · scale) v with grouped key/value heads, which are never expanded.

One definition for all tiers. Causality and the window are aligned bottom-right: query i of S_q stands at position
S_k − S_q + i. A query before the first key sees nothing and is zero; what comes out for one that only a mask blinds
(a padding token's) is finite and means nothing: zero in eager, and in the torch tier whatever SDPA gives.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_rocm.ops import attention_eager, attention_torch
from hf_rocm.ops.aiter import attention as aiter
from hf_rocm.ops.aiter import triton, varlen
from hf_rocm.ops.aiter.detect import checked
from hf_rocm.ops.decode import FEW_QUERIES
from hf_rocm.ops.padded import Padded, attend
from hf_rocm.ops.registry import Implementation, Operation, kernel_serves, refuses_nothing, route
from hf_rocm.ops.triton import decode as split
from hf_rocm.ops.triton.detect import checked as checked_triton


class AttentionSpec(NamedTuple):
    """What the choice of an attention implementation depends on."""

    dtype: torch.dtype
    device: torch.device
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    one_query: bool  # S_q == 1
    square: bool  # S_q == S_k
    more_queries: bool  # S_q > S_k
    causal: bool
    window: int | None
    softcap: bool
    sinks: bool
    mask: torch.dtype | None
    grad: bool
    weights: bool
    few_queries: bool = False  # 1 < S_q ≤ FEW_QUERIES, S_q < S_k


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    padded: Padded | None = None,
    weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Scaled dot-product attention over grouped heads.

    query: [B, H, S_q, D]; key: [B, Hkv, S_k, D]; value: [B, Hkv, S_k, D_v]; H a multiple of Hkv.
    mask: [B | 1, H | 1, S_q | 1, ≥ S_k], bool (True = visible) or additive in query's dtype; further keys of the mask
    are ignored. window: how many keys a query sees, itself included. softcap: c · tanh(score / c). sinks: [H] logits
    that take part in the softmax and carry no value. Everything that restricts is combined. padded: what `recognise`
    found in the mask, which then stands for the mask, causality and the window.
    Returns ([B, S_q, H, D_v] contiguous, weights [B, H, S_q, S_k] if asked for, else None).
    """
    if padded is not None and not weights:
        return attend(query, key, value, padded, scale=scale, softcap=softcap, sinks=sinks), None
    _, heads, s_q, head_dim = query.shape
    _, kv_heads, s_k, value_dim = value.shape
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    spec = (
        query.dtype,
        query.device,
        heads,
        kv_heads,
        head_dim,
        value_dim,
        s_q == 1,
        s_q == s_k,
        s_q > s_k,
        causal,
        window,
        softcap is not None,
        sinks is not None,
        None if mask is None else mask.dtype,
        grad,
        weights,
        1 < s_q <= FEW_QUERIES and s_q < s_k,
    )
    serve = route(_operation, spec, query, key, value)
    result: tuple[Tensor, Tensor | None] = serve(
        query, key, value, scale=scale, causal=causal, mask=mask, window=window, softcap=softcap, sinks=sinks
    )
    return result


def mask_serves(query: Tensor, key: Tensor, value: Tensor, mask: torch.dtype, *, softcap: bool, sinks: bool) -> bool:
    """Whether a kernel takes such a call with a mask of this dtype that holds everything else."""
    _, heads, s_q, head_dim = query.shape
    _, kv_heads, s_k, value_dim = value.shape
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    spec = AttentionSpec(
        dtype=query.dtype,
        device=query.device,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        one_query=s_q == 1,
        square=s_q == s_k,
        more_queries=s_q > s_k,
        causal=False,
        window=None,
        softcap=softcap,
        sinks=sinks,
        mask=mask,
        grad=grad,
        weights=False,
        few_queries=1 < s_q <= FEW_QUERIES and s_q < s_k,
    )
    return kernel_serves(_operation, tuple(spec))


_operation = Operation("attention", AttentionSpec)
for _name, _refuses, _call in (
    ("flash_attn_func", aiter.flash_attn_func_refuses, aiter.flash_attn_func),
    ("mha_fwd", aiter.mha_fwd_refuses, aiter.mha_fwd),
    ("flash_attn_varlen_func", varlen.dense_refuses, varlen.dense),
    ("triton flash_attn_func", triton.refuses, triton.attention),
    ("mha_fwd, sinks by lse", aiter.mha_fwd_lse_refuses, aiter.mha_fwd_lse),
):
    _operation.register(Implementation("aiter", _name, _refuses, _call, checked("attention", _name)))
_operation.register(
    Implementation(
        "triton",
        "decode_kernel",
        split.attention_refuses,
        split.attention,
        checked_triton("attention", "decode_kernel"),
    )
)
_operation.register(Implementation("torch", "SDPA", attention_torch.refuses, attention_torch.attention))
_operation.register(Implementation("eager", "softmax", refuses_nothing, attention_eager.attention))
