"""RoPE through aiter's `rope_cached_2c_fwd_impl`: queries and keys with any strides in one launch; no gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_rocm.ops.aiter import contract, detect
from hf_rocm.ops.aiter.contract import why_not
from hf_rocm.ops.custom_op import opaque

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.specs.pointwise import RopeSpec


def refuses(spec: RopeSpec, device: Device) -> str | None:
    reason = detect.unavailable(device, portable=True)
    if reason is not None:
        return reason
    if spec.grad:
        return "aiter's RoPE returns the wrong number of gradients"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"aiter's RoPE supports fp16 and bf16, not {spec.dtype}"
    if spec.angle_dtype != spec.dtype:
        return f"aiter's RoPE needs angles of {spec.dtype}, got {spec.angle_dtype}"
    if not spec.shared:
        return "aiter's RoPE takes only one table of angles for the whole batch"
    if spec.head_dim % 8 or spec.rotated % 8:
        sizes = f"{spec.head_dim}, of which {spec.rotated} are rotated"
        return f"aiter's RoPE needs a head dim and a number of rotated dims that are multiples of 8, got {sizes}"
    return why_not(_kernel())


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """See `hf_rocm.ops.rope`."""
    result: tuple[Tensor, Tensor] = _traced(query, key, cos, sin, interleaved)
    return result


_GIVEN = frozenset(
    (
        "output_x",
        "output_y",
        "input_x",
        "input_y",
        "cos",
        "sin",
        "rotate_style",
        "reuse_freqs_front_part",
        "nope_first",
    )
)


def _kernel() -> contract.Call | str:
    return contract.operator("rope_cached_2c_fwd_impl", _GIVEN)


def _forward(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    outputs = _like(query, key)
    if query.numel() == 0:
        return outputs
    s, r = cos.shape[1], cos.shape[2]
    kernel: Any = _kernel()
    kernel(
        # [B, H, S, D] viewed as [S, B, H, D]
        output_x=outputs[0].permute(2, 0, 1, 3),
        output_y=outputs[1].permute(2, 0, 1, 3),
        input_x=query.permute(2, 0, 1, 3),
        input_y=key.permute(2, 0, 1, 3),
        cos=cos.reshape(s, 1, 1, r).contiguous(),
        sin=sin.reshape(s, 1, 1, r).contiguous(),
        rotate_style=int(interleaved),
        reuse_freqs_front_part=False,
        nope_first=False,
    )
    return outputs


def _like(query: Tensor, key: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


_traced = opaque(
    "aiter_rope(Tensor query, Tensor key, Tensor cos, Tensor sin, bool interleaved) -> (Tensor, Tensor)",
    _forward,
    _like,
)
