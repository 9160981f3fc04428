"""Packed attention through aiter's `flash_attn_varlen_func`, the only function used here that supports a softcap."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_rocm.ops.aiter import contract, detect
from hf_rocm.ops.aiter.attention import dense_limits, limits, may_be_assembly, window_sides
from hf_rocm.ops.aiter.contract import why_not
from hf_rocm.ops.aiter.layout import aligned, rows_first
from hf_rocm.ops.custom_op import opaque

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hf_rocm.device import Device
    from hf_rocm.ops.specs.attention import AttentionSpec, AttentionTerms, VarlenSpec, VarlenTerms

# In earlier releases, calls with a softcap may run assembly kernels that ignore it.
SOFTCAP_SINCE = "0.1.7.post3"
# Earlier releases may choose gfx942's assembly kernels on GPUs of other architectures.
ASSEMBLY_BY_ARCH_SINCE = "0.1.16"


def dense_refuses(spec: AttentionSpec, device: Device) -> str | None:
    """Why `dense`, which packs sequences of equal length, can't serve this call, or None."""
    reason = detect.unavailable(device) or dense_limits(spec)
    if reason is not None:
        return reason
    if not spec.softcap:
        return "flash_attn_varlen_func is used only with a softcap: without one, packing takes extra time"
    return _refuses(spec, device)


def packed_refuses(spec: VarlenSpec, device: Device) -> str | None:
    reason = detect.unavailable(device) or limits(spec)
    if reason is None and spec.lse:
        return "the call to flash_attn_varlen_func does not return the log-sum-exp"
    return reason or _refuses(spec, device)


def dense(query: Tensor, key: Tensor, value: Tensor, **terms: Unpack[AttentionTerms]) -> tuple[Tensor, None]:
    """See `hf_rocm.ops.attention`; mask and sinks are always None here."""
    b, h, s_q, _ = query.shape
    s_k = key.shape[2]
    if query.numel() == 0 or key.numel() == 0:
        return query.new_zeros((b, s_q, h, value.shape[3])), None
    q, k, v = (rows_first(tensor).flatten(0, 1) for tensor in (query, key, value))
    output = packed(
        q,
        k,
        v,
        _steps(b, s_q, query.device),
        _steps(b, s_k, query.device),
        longest_query=s_q,
        longest_key=s_k,
        scale=terms["scale"],
        causal=terms["causal"],
        window=terms["window"],
        softcap=terms["softcap"],
        sinks=None,
        lse=False,
    )
    return output.view(b, s_q, h, value.shape[3]), None


def packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    **terms: Unpack[VarlenTerms],
) -> Tensor:
    """See `hf_rocm.ops.varlen_attention`; sinks are always None here, and lse is False."""
    left, right = window_sides(terms["window"], terms["causal"])
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    call = _forward if grad else _traced
    output: Tensor = call(
        query,
        key,
        value,
        query_ends,
        key_ends,
        terms["longest_query"],
        terms["longest_key"],
        terms["scale"],
        terms["causal"],
        left,
        right,
        terms["softcap"] or 0.0,
        grad,
    )
    return output


def _refuses(spec: AttentionSpec | VarlenSpec, device: Device) -> str | None:
    release = detect.release()
    if spec.sinks:
        return "flash_attn_varlen_func may choose an assembly kernel, which would drop the sinks"
    if spec.softcap and spec.grad:
        return "the backward pass of flash_attn_varlen_func has no softcap"
    if spec.window == 1:
        return "for a window of one key, flash_attn_varlen_func would choose an assembly kernel that has no windows"
    if may_be_assembly(spec):
        if spec.softcap and not release.at_least(SOFTCAP_SINCE):
            return f"flash_attn_varlen_func of {release.name} would choose an assembly kernel that drops the softcap"
        if device.arch not in ("gfx942", "gfx950") and not release.at_least(ASSEMBLY_BY_ARCH_SINCE):
            return f"flash_attn_varlen_func of {release.name} would choose gfx942's assembly kernel on {device.arch}"
    return why_not(_kernel())


_GIVEN = frozenset(
    (
        "q",
        "k",
        "v",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "max_seqlen_q",
        "max_seqlen_k",
        "dropout_p",
        "softmax_scale",
        "logits_soft_cap",
        "causal",
        "window_size",
        "return_lse",
    )
)


def _kernel() -> contract.Call | str:
    return contract.function("flash_attn_varlen_func", _GIVEN)


@lru_cache(maxsize=64)
def _steps(b: int, length: int, device: torch.device) -> Tensor:
    """[B + 1] int32: 0, length, 2 · length, …, the cumulative lengths of B sequences of equal length."""
    return torch.arange(0, (b + 1) * length, length, dtype=torch.int32, device=device)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    grad: bool,
) -> Tensor:
    if query.numel() == 0 or key.numel() == 0:
        return _shape(query, key, value).zero_() + (query.sum() + key.sum() + value.sum()) * 0
    kernel: Any = _kernel()
    result = kernel(
        q=aligned(query),
        k=aligned(key),
        v=aligned(value),
        cu_seqlens_q=query_ends,
        cu_seqlens_k=key_ends,
        max_seqlen_q=longest_query,
        max_seqlen_k=longest_key,
        dropout_p=0.0,
        softmax_scale=scale,
        logits_soft_cap=softcap,
        causal=causal,
        window_size=(left, right),
        return_lse=grad,
    )
    output: Tensor = result[0] if isinstance(result, (tuple, list)) else result
    return output.contiguous()


def _shape(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty((query.shape[0], query.shape[1], value.shape[2]))


_traced = opaque(
    "aiter_varlen(Tensor query, Tensor key, Tensor value, Tensor query_ends, Tensor key_ends, SymInt longest_query, "
    "SymInt longest_key, float scale, bool causal, int left, int right, float softcap, bool grad) -> Tensor",
    _forward,
    _shape,
)
