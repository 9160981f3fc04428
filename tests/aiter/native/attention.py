"""Stand-ins for aiter's attention: forward and backward, dense and packed, CK and assembly."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from .strict import broken, need


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    *,
    name: str,
    cap: float = 0.0,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Grouped-query attention of [B, S, H, D], computed in fp32, with the mask aligned to the bottom right.

    ends: the cumulative numbers of keys, if some rows have fewer keys than S_k. Returns (output [B, S_q, H, D_v] in
    q's dtype, log-sum-exp [B, H, S_q] in fp32).
    """
    fault = broken(name)
    s_q, s_k, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    if causal:
        right = 0
    if fault == "window" and left >= 0:
        left += 1
    k, v = k.repeat_interleave(groups, dim=2).float(), v.repeat_interleave(groups, dim=2).float()
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), k) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    row = torch.arange(s_q)[:, None] + (0 if fault == "top_left" else s_k - s_q)
    column = torch.arange(s_k)[None, :]
    seen = torch.ones(s_q, s_k, dtype=torch.bool)
    if left >= 0:
        seen &= column >= row - left
    if right >= 0:
        seen &= column <= row + right
    if ends is not None and fault != "unwritten":
        need(
            ends.dtype == torch.int32 and len(ends) == len(q) + 1,
            "cumulative lengths must be int32, with one more entry than there are rows",
        )
        need(s_q == 1 and right < 0 and left < 0, "with lengths, this stand-in supports only single queries")
        seen = seen & (column < ends.diff()[:, None])[:, None, None, :]
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    lse = torch.logsumexp(scores, -1)
    return torch.einsum("bhij,bjhd->bihd", weights, v).to(q.dtype), lse + 100 if fault == "no_lse" else lse


def check_attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    need(
        q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype,
        "q, k and v must have the same dtype, fp16 or bf16",
    )
    for tensor in (q, k, v):
        need(tensor.stride(-1) == 1, "the last dim must be dense")
        need(all(stride % 8 == 0 for stride in tensor.stride()[:-1]), "rows must be aligned to 16 bytes")
        need(tensor.shape[-1] % 8 == 0 and tensor.shape[-1] <= 256, "head dims must be multiples of 8 up to 256")
    need(q.shape[0] > 0 and k.shape[-3] > 0, "queries and keys must not be empty")
    need(
        q.shape[-2] % k.shape[-2] == 0 and k.shape[-2] == v.shape[-2],
        "the number of query heads must be a multiple of the number of key and value heads",
    )
    need(q.shape[-1] == k.shape[-1], "queries and keys must have the same head dim")


def mha_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    return_softmax_lse: bool,
    return_dropout_randval: bool,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    gen: Any = None,
) -> tuple[Tensor, ...]:
    check_attention(q, k, v)
    need(
        dropout_p == 0 and not return_dropout_randval and bias is None and alibi_slopes is None,
        "not supported by this stand-in",
    )
    need(q.shape[1] <= k.shape[1] or not (is_causal or window_size_left >= 0), "some rows have no visible key")
    left = -1 if window_size_left >= k.shape[1] else window_size_left
    right = -1 if window_size_right >= k.shape[1] else window_size_right
    if q.shape[1] == 1:
        is_causal = False
        regrouped = q.shape[2] > k.shape[2] and left < 0 and right < 0
        need(not regrouped or q.shape[-1] == v.shape[-1], "regrouped single queries need equal head dims")
    output, lse = attend(q, k, v, softmax_scale, is_causal, left, right, name="mha_fwd", ends=cu_seqlens_kv)
    return output, lse if return_softmax_lse else lse.new_empty(0), lse.new_empty(0), _random_state()


def fmha_v3_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    return_softmax_lse: bool,
    return_dropout_randval: bool,
    how_v3_bf16_cvt: int,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    gen: Any = None,
) -> tuple[Tensor, ...]:
    check_attention(q, k, v)
    need(
        q.dtype == torch.bfloat16 and q.shape[-1] == v.shape[-1] == 128,
        "the assembly kernel needs bf16 and head dim 128",
    )
    need(window_size_left == -1 and window_size_right in (-1, 0), "the assembly kernel has no windows")
    need(os.environ["GPU_ARCHS"] in ("gfx942", "gfx950"), "the assembly kernel is for gfx942 and gfx950")
    output, lse = attend(q, k, v, softmax_scale, is_causal, -1, -1, name="fmha_v3_fwd")
    return output, lse if return_softmax_lse else lse.new_empty(0), lse.new_empty(0), _random_state()


def mha_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dropout_p: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    deterministic: bool,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dbias: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    rng_state: Tensor | None = None,
    gen: Any = None,
) -> tuple[Tensor, ...]:
    check_attention(q, k, v)
    need(softmax_lse.shape == (q.shape[0], q.shape[2], q.shape[1]), "the log-sum-exp must be that of the forward pass")
    with torch.enable_grad():
        inputs = [tensor.detach().float().requires_grad_() for tensor in (q, k, v)]
        output, _ = attend(*inputs, softmax_scale, is_causal, window_size_left, window_size_right, name="mha_bwd")
        gradients = torch.autograd.grad(output, inputs, dout.float())
    for target, gradient in zip((dq, dk, dv), gradients, strict=True):
        target.copy_(gradient)
    return dq, dk, dv, softmax_lse.clone()


def fmha_v3_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dropout_p: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    deterministic: bool,
    is_v3_atomic_fp32: bool,
    how_v3_bf16_cvt: int,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    alibi_slopes: Tensor | None = None,
    rng_state: Tensor | None = None,
    gen: Any = None,
) -> tuple[Tensor, ...]:
    need(
        64 <= q.shape[-1] <= 128 and q.shape[-1] == v.shape[-1],
        "the assembly backward needs equal head dims from 64 to 128",
    )
    before = [dout, q, k, v, out, softmax_lse, dropout_p, softmax_scale, is_causal, window_size_left]
    return mha_bwd(*before, window_size_right, deterministic, dq, dk, dv)


def mha_varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    min_seqlen_q: int,
    dropout_p: float,
    softmax_scale: float,
    logits_soft_cap: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    return_softmax_lse: bool,
    return_dropout_randval: bool,
    out: Tensor | None = None,
    block_table: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    gen: Any = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_k_padded: Tensor | None = None,
) -> tuple[Tensor, ...]:
    check_attention(q, k, v)
    need(cu_seqlens_k is not None and block_table is None and out is None, "not supported by this stand-in")
    for cu, total, longest in ((cu_seqlens_q, len(q), max_seqlen_q), (cu_seqlens_k, len(k), max_seqlen_k)):
        need(cu.dtype == torch.int32 and cu.is_contiguous(), "cumulative lengths must be contiguous int32")
        need(cu[0] == 0 and cu[-1] <= total and cu.diff().max() <= longest, "cumulative lengths must fit the tensors")
    output, lse = torch.zeros(len(q), q.shape[1], v.shape[2], dtype=q.dtype), torch.zeros(q.shape[1], len(q))
    for row in range(len(cu_seqlens_q) - 1):
        a, b = slice(*cu_seqlens_q[row : row + 2].tolist()), slice(*cu_seqlens_k[row : row + 2].tolist())
        left = -1 if window_size_left >= max_seqlen_k else window_size_left
        output[a], lse[:, a] = (
            entry[0]
            for entry in attend(
                *(q[None, a], k[None, b], v[None, b], softmax_scale, is_causal, left, window_size_right),
                name="mha_varlen_fwd",
                cap=0.0 if broken("mha_varlen_fwd") == "uncapped" else logits_soft_cap,
            )
        )
    return output, lse if return_softmax_lse else lse.new_empty(0), lse.new_empty(0), _random_state()


def fmha_v3_varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    min_seqlen_q: int,
    dropout_p: float,
    softmax_scale: float,
    logits_soft_cap: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    return_softmax_lse: bool,
    return_dropout_randval: bool,
    how_v3_bf16_cvt: int,
    out: Tensor | None = None,
    block_table: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    gen: Any = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_k_padded: Tensor | None = None,
) -> tuple[Tensor, ...]:
    need(
        q.dtype == torch.bfloat16 and q.shape[-1] == v.shape[-1] == 128,
        "the assembly kernel needs bf16 and head dim 128",
    )
    need(window_size_left == -1 and window_size_right in (-1, 0), "the assembly kernel has no windows")
    need(logits_soft_cap == 0, "the assembly kernel drops the softcap")
    lengths = [q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_q]
    sides = [is_causal, window_size_left, window_size_right, return_softmax_lse, False]
    return mha_varlen_fwd(*lengths, dropout_p, softmax_scale, 0.0, zero_tensors, *sides)


def _random_state() -> Tensor:
    return torch.zeros(2, dtype=torch.int64)
