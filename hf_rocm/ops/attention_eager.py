"""Attention in plain PyTorch: the oracle for every other tier, and the only tier that returns attention weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hf_rocm.ops.specs.attention import AttentionTerms


def attention(query: Tensor, key: Tensor, value: Tensor, **terms: Unpack[AttentionTerms]) -> tuple[Tensor, Tensor]:
    """See `hf_rocm.ops.attention`. The softmax runs in fp32 (fp64 for fp64). Always returns the attention weights."""
    sinks = terms["sinks"]
    b, h, s_q, _ = query.shape
    kv_heads, s_k, value_dim = key.shape[1], key.shape[2], value.shape[3]
    scores = _scores(query, key, terms)
    wide = scores.dtype

    # exp and sum instead of softmax: a query whose keys are all masked gets zeros, not NaN, and a sink only adds to the
    # sum
    peak = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(wide).min)
    if sinks is not None:
        sink = sinks.to(wide).view(1, h, 1, 1)
        peak = torch.maximum(peak, sink)
    exponentials = torch.exp(scores - peak)
    total = exponentials.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - peak)
    weights = (exponentials / total.clamp(min=torch.finfo(wide).tiny)).to(query.dtype)

    stacked = weights.view(b, kv_heads, -1, s_k)
    output = torch.matmul(stacked, value).view(b, h, s_q, value_dim)
    return output.transpose(1, 2).contiguous(), weights


def log_sum_exp(query: Tensor, key: Tensor, **terms: Unpack[AttentionTerms]) -> Tensor:
    """The logarithms of the softmax's denominators: [B, S_q, H] in fp32 (fp64 for fp64)."""
    scores = _scores(query, key, terms)
    if terms["sinks"] is not None:
        sinks = terms["sinks"].to(scores.dtype).view(1, -1, 1, 1)
        scores = torch.cat((scores, sinks.expand(*scores.shape[:3], 1)), -1)
    return torch.logsumexp(scores, -1).transpose(1, 2)


def _scores(query: Tensor, key: Tensor, terms: AttentionTerms) -> Tensor:
    """[B, H, S_q, S_k] in fp32 (fp64 for fp64): the masked scores without sinks."""
    mask, softcap = terms["mask"], terms["softcap"]
    b, h, s_q, _ = query.shape
    kv_heads, s_k = key.shape[1], key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)

    # The queries of a group are stacked, so that one GEMM computes their scores with the shared key head.
    rows = query.reshape(b, kv_heads, -1, query.shape[3])  # [B, Hkv, G·S_q, D]
    scores = torch.matmul(rows, key.transpose(2, 3)).to(wide) * terms["scale"]
    scores = scores.view(b, h, s_q, s_k)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)

    seen = visible(s_q, s_k, causal=terms["causal"], window=terms["window"], device=query.device)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    if mask is not None:
        mask = mask[..., :s_k]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores


def visible(s_q: int, s_k: int, *, causal: bool, window: int | None, device: torch.device) -> Tensor | None:
    """[S_q, S_k] bool, True where query i may attend to key j; None if every query may attend to every key."""
    if not causal and window is None:
        return None
    position = torch.arange(s_k - s_q, s_k, device=device)[:, None]
    keys = torch.arange(s_k, device=device)[None, :]
    seen = torch.ones(s_q, s_k, dtype=torch.bool, device=device)
    if causal:
        seen = seen & (keys <= position)
    if window is not None:
        seen = seen & (keys > position - window)
    return seen
