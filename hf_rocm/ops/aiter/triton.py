"""Attention on Radeon through aiter's Triton kernel, which AMD supports there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_rocm.ops.aiter import contract, detect
from hf_rocm.ops.aiter.attention import dense_limits, window_sides
from hf_rocm.ops.aiter.contract import why_not
from hf_rocm.ops.aiter.layout import rows_first
from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.fakes import attended

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hf_rocm.device import Device
    from hf_rocm.ops.specs.attention import AttentionSpec, AttentionTerms

NAME = "ops.triton.attention.mha:flash_attn_func"

# Among Radeon GPUs, aiter has a table of tiles only for gfx1151, and raises an error for all others. A kernel that
# Triton 3.6 compiles for gfx1151 with the tile in that table spills 127 registers at head dim 128. With the tile below,
# it spills no registers, and uses 8 KiB of the 64 KiB of LDS.
_TILE = {
    "BLOCK_M": 32,
    "BLOCK_N": 16,
    "PRELOAD_V": False,
    "waves_per_eu": 1,
    "num_warps": 4,
    "num_ctas": 1,
    "num_stages": 1,
}
# The Radeon GPUs for which aiter has tiles, including those of the gradients.
_WITH_TILES = ("gfx1151",)


def refuses(spec: AttentionSpec, device: Device) -> str | None:
    reason = detect.unavailable(device, portable=True)
    if reason is not None:
        return reason
    if device.arch not in detect.RADEON:
        return f"on {device.arch} aiter's compiled kernels are used instead"
    reason = dense_limits(spec)
    if reason is not None:
        return reason
    if spec.softcap:
        return "aiter's Triton attention has no softcap"
    if spec.value_dim != spec.head_dim:
        return f"aiter's Triton attention needs equal head dims, got {spec.head_dim} and {spec.value_dim}"
    if (device.arch or "").startswith("gfx11") and spec.head_dim > 128:
        return f"on {device.arch} aiter's Triton attention would spill registers for head dims above 128"
    if spec.window is not None and not spec.causal and not spec.one_query:
        return "the windows of aiter's Triton attention are causal"
    if spec.grad and device.arch not in _WITH_TILES:
        return f"aiter has no tiles for the gradients of attention on {device.arch}"
    if spec.sinks and spec.grad:
        return "aiter's Triton attention is not used for the gradients of sinks"
    return why_not(_kernel(sinks=spec.sinks))


def attention(query: Tensor, key: Tensor, value: Tensor, **terms: Unpack[AttentionTerms]) -> tuple[Tensor, None]:
    """See `hf_rocm.ops.attention`; mask and softcap are always None here. Differentiable."""
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    call = _forward if grad else _traced
    left, _ = window_sides(terms["window"], terms["causal"])
    causal = terms["causal"] or terms["window"] is not None
    output: Tensor = call(query, key, value, terms["sinks"], terms["scale"], causal, left)
    return output, None


_GIVEN = frozenset(("q", "k", "v", "softmax_scale", "causal", "window_size", "config"))


def _kernel(*, sinks: bool) -> contract.Call | str:
    return contract.function(NAME, _GIVEN | {"sink"} if sinks else _GIVEN)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float, causal: bool, left: int
) -> Tensor:
    if query.numel() == 0 or key.numel() == 0:
        return attended(query, key, value).zero_() + (query.sum() + key.sum() + value.sum()) * 0
    kernel: Any = _kernel(sinks=sinks is not None)
    further = {} if sinks is None else {"sink": sinks.float()}
    result = kernel(
        q=rows_first(query),
        k=rows_first(key),
        v=rows_first(value),
        softmax_scale=scale,
        causal=causal,
        window_size=(left, -1),
        config=dict(_TILE),
        **further,
    )
    output: Tensor = result[0] if isinstance(result, (tuple, list)) else result
    return output.contiguous()


_traced = opaque(
    "aiter_triton(Tensor query, Tensor key, Tensor value, Tensor? sinks, float scale, bool causal, int left) -> Tensor",
    _forward,
    attended,
)
