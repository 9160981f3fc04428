"""Attention on Radeon through aiter's Triton kernel, the one that AMD lists there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_rocm.ops.aiter import contract, detect
from hf_rocm.ops.aiter.attention import dense_limits
from hf_rocm.ops.aiter.contract import why_not
from hf_rocm.ops.aiter.layout import rows_first
from hf_rocm.ops.opaque import opaque

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.attention import AttentionSpec

NAME = "ops.triton.attention.mha:flash_attn_func"


def refuses(spec: AttentionSpec, device: Device) -> str | None:
    reason = detect.unavailable(device, portable=True)
    if reason is not None:
        return reason
    if device.arch not in detect.RADEON:
        return f"on {device.arch} aiter's compiled kernels come first"
    reason = dense_limits(spec)
    if reason is not None:
        return reason
    if spec.softcap:
        return "aiter's Triton attention has no softcap"
    if spec.value_dim != spec.head_dim:
        return f"aiter's Triton attention has one head dim, got {spec.head_dim} and {spec.value_dim}"
    if spec.window is not None and not spec.causal and not spec.one_query:
        return "the windows of aiter's Triton attention are causal"
    if spec.sinks and spec.grad:
        return "the gradients of sinks are not asked of aiter's Triton attention"
    return why_not(_kernel(sinks=spec.sinks))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool,
    mask: Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, None]:
    """See `hf_rocm.ops.attention`; mask and softcap are always None here. Differentiable."""
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    call = _forward if grad else _traced
    left = -1 if window is None else window - 1
    output: Tensor = call(query, key, value, sinks, scale, causal or window is not None, left)
    return output, None


_GIVEN = frozenset(("q", "k", "v", "softmax_scale", "causal", "window_size"))


def _kernel(*, sinks: bool) -> contract.Call | str:
    return contract.function(NAME, _GIVEN | {"sink"} if sinks else _GIVEN)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float, causal: bool, left: int
) -> Tensor:
    if query.numel() == 0 or key.numel() == 0:
        return _shape(query, key, value).zero_() + (query.sum() + key.sum() + value.sum()) * 0
    kernel: Any = _kernel(sinks=sinks is not None)
    further = {} if sinks is None else {"sink": sinks.float()}
    result = kernel(
        q=rows_first(query),
        k=rows_first(key),
        v=rows_first(value),
        softmax_scale=scale,
        causal=causal,
        window_size=(left, -1),
        **further,
    )
    output: Tensor = result[0] if isinstance(result, (tuple, list)) else result
    return output.contiguous()


def _shape(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))


_traced = opaque(
    "aiter_triton(Tensor query, Tensor key, Tensor value, Tensor? sinks, float scale, bool causal, int left) -> Tensor",
    _forward,
    _shape,
)
