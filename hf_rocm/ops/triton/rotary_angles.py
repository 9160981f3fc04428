"""Compute cos and sin of the rotary angles with one launch of hf_rocm's kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.triton import detect
from hf_rocm.ops.triton.launch import launch, power_of_two, warps
from hf_rocm.ops.triton.norm import DTYPES
from hf_rocm.ops.triton.rope import WIDEST

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.specs.pointwise import RotaryAnglesSpec

_POSITIONS = (torch.int64, torch.int32)


def refuses(spec: RotaryAnglesSpec, device: Device) -> str | None:
    """Why the kernel can't compute these angles, or None."""
    if spec.grad:
        return "the rotary angles kernel has no gradient"
    if spec.dtype not in DTYPES or spec.freq_dtype not in DTYPES:
        return (
            f"the rotary angles kernel supports fp32, bf16 and fp16, got an output of "
            f"{spec.dtype} and frequencies of {spec.freq_dtype}"
        )
    if spec.position_dtype not in _POSITIONS:
        return f"the rotary angles kernel needs int64 or int32 positions, got {spec.position_dtype}"
    if not 0 < spec.frequencies <= WIDEST // 2:
        return f"the rotary angles kernel takes 1 to {WIDEST // 2} frequencies, got {spec.frequencies}"
    return detect.unavailable(device)


def rotary_angles(
    inv_freq: Tensor, position_ids: Tensor, scaling: float, layout: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `hf_rocm.ops.rotary_angles`."""
    result: tuple[Tensor, Tensor] = _traced(inv_freq, position_ids, scaling, layout, dtype)
    return result


def tile(rows: int, frequencies: int) -> tuple[int, int]:
    """(tokens, threads) of a program, both powers of two."""
    block = power_of_two(frequencies)
    tokens = 1 if rows < 64 else max(1, 512 // block)
    return tokens, min(256, max(64, tokens * block // 4))


def _forward(
    inv_freq: Tensor, position_ids: Tensor, scaling: float, layout: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    cos, sin = _empty(inv_freq, position_ids, scaling, layout, dtype)
    if cos.numel():
        from hf_rocm.ops.triton.kernels.rotary_angles import rotary_angles_kernel

        rows, length, frequencies = position_ids.numel(), position_ids.shape[1], len(inv_freq)
        tokens, threads = tile(rows, frequencies)
        launch(
            rotary_angles_kernel,
            (-(-rows // tokens),),
            (inv_freq.contiguous(), position_ids, cos, sin, rows, length, *position_ids.stride(), float(scaling)),
            {
                "FREQUENCIES": frequencies,
                "LAYOUT": layout,
                "ROWS": tokens,
                "BLOCK": power_of_two(frequencies),
            },
            num_warps=warps(threads, inv_freq.device),
            contract=False,
        )
    return cos, sin


def _empty(inv_freq: Tensor, position_ids: Tensor, _: float, layout: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (*position_ids.shape, inv_freq.shape[0] * (1 if layout == "once" else 2))
    return inv_freq.new_empty(shape, dtype=dtype), inv_freq.new_empty(shape, dtype=dtype)


_traced = opaque(
    "triton_rotary_angles(Tensor inv_freq, Tensor position_ids, float scaling, str layout, ScalarType dtype) "
    "-> (Tensor, Tensor)",
    _forward,
    _empty,
)
