"""Round rows to 8 bits in one kernel, with the same numbers and scales as `eight_bit.quantize_rows`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_rocm.ops.eight_bit import INT8, fp8_of, largest
from hf_rocm.ops.triton import detect
from hf_rocm.ops.triton.launch import launch, warps
from hf_rocm.ops.triton.norm import DTYPES
from hf_rocm.ops.triton.quantized import format_refuses
from hf_rocm.ops.triton.tiles import rounding_tile

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.specs.quantized import RoundingSpec

NAME = "round_rows_kernel"
# The largest number of columns that a program reads at a time.
WIDEST = rounding_tile(2**30)[0]


def refuses(spec: RoundingSpec, device: Device) -> str | None:
    """Why the kernel can't round these rows, or None."""
    reason = detect.unavailable(device)
    if reason is not None:
        return reason
    if spec.dtype not in DTYPES:
        return f"the kernel rounds fp32, bf16 and fp16, not {spec.dtype}"
    # Without an instruction for this format, the compiler rounds twice.
    if spec.format not in (INT8, fp8_of(device)):
        return f"{device.arch or 'this device'} has no instruction that rounds to {spec.format}"
    return format_refuses(spec, device)


def round_rows(x: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """The bytes of `quantize_rows(x, format)`, uint8, and its scales. x: [M, K]."""
    out = x.new_empty(x.shape, dtype=format)
    scale = x.new_empty((len(x), 1), dtype=torch.float32)
    if out.numel():
        from hf_rocm.ops.triton.kernels.rounding import round_rows_kernel

        block, threads = rounding_tile(x.shape[1])
        launch(
            round_rows_kernel,
            (len(x),),
            (x.contiguous(), out, scale, x.shape[1]),
            {"LARGEST": largest(format), "BLOCK": block},
            num_warps=warps(threads, x.device),
        )
    return out.view(torch.uint8), scale
