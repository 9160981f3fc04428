"""8-bit linear layers through aiter's `gemm_a8w8`, and `gemm_a8w8_bpreshuffle` for weights in its own order.

Rows are rounded by PyTorch: aiter's own quantising kernel divides by the largest magnitude, so a row of zeros becomes
NaN, and it passes over a NaN when it looks for that magnitude.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_rocm.ops.aiter import contract, detect
from hf_rocm.ops.aiter.contract import why_not
from hf_rocm.ops.eight_bit import INT8, fp8_of, quantize_rows
from hf_rocm.ops.opaque import opaque

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.quantized import QuantizedSpec

# Its tiles are up to 256 rows wide, and it has no padding; K below 512 is left to few, rarely used kernels.
TILE, SHORTEST = 256, 512


def refuses(spec: QuantizedSpec, device: Device) -> str | None:
    reason = _refuses_alike(spec, device)
    if reason is not None:
        return reason
    if spec.shuffled:
        return "gemm_a8w8 reads weights in their plain order, and this one is shuffled"
    if spec.k % 16 or spec.n % 8:
        return f"gemm_a8w8 needs K to be a multiple of 16 and N of 8, got {spec.n} × {spec.k}"
    return why_not(_gemm("gemm_a8w8"))


def shuffled_refuses(spec: QuantizedSpec, device: Device) -> str | None:
    reason = _refuses_alike(spec, device)
    if reason is not None:
        return reason
    if not spec.shuffled:
        return "gemm_a8w8_bpreshuffle reads shuffled weights, and this one is in its plain order"
    if spec.format == INT8:
        return "gemm_a8w8_bpreshuffle is for fp8"
    if spec.n % TILE or spec.k % TILE or spec.k < SHORTEST:
        return f"gemm_a8w8_bpreshuffle needs multiples of {TILE} and K from {SHORTEST} on, got {spec.n} × {spec.k}"
    return why_not(_gemm("gemm_a8w8_bpreshuffle"))


def _refuses_alike(spec: QuantizedSpec, device: Device) -> str | None:
    reason = detect.unavailable(device)
    if reason is not None:
        return reason
    if spec.dtype not in (torch.float16, torch.bfloat16) or spec.bias_dtype not in (None, spec.dtype):
        return f"gemm_a8w8 gives fp16 and bf16 with a bias of the same, got {spec.dtype} and {spec.bias_dtype}"
    native = fp8_of(device)
    if spec.format != INT8 and spec.format != native:
        return f"{device.arch} multiplies {native or 'no fp8'}, not {spec.format}"
    return None


def linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, format: torch.dtype, shuffled: bool
) -> Tensor:
    """See `hf_rocm.ops.quantized_linear`."""
    rows, row_scale = quantize_rows(x.reshape(-1, x.shape[-1]), format)
    product: Tensor = _traced(rows.contiguous(), weight, row_scale.contiguous(), scale, bias, x.dtype)
    return product.view(*x.shape[:-1], weight.shape[0])


def shuffled_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, format: torch.dtype, shuffled: bool
) -> Tensor:
    """The same on a shuffled weight."""
    rows, row_scale = quantize_rows(x.reshape(-1, x.shape[-1]), format)
    product: Tensor = _traced_shuffled(rows.contiguous(), weight, row_scale.contiguous(), scale, bias, x.dtype)
    return product.view(*x.shape[:-1], weight.shape[0])


def _gemm(name: str) -> contract.Call | str:
    return contract.operator(name, frozenset(("XQ", "WQ", "x_scale", "w_scale", "bias", "dtype")))


def _linear(
    rows: Tensor, weight: Tensor, row_scale: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if rows.numel() == 0:
        return _shape(rows, weight, row_scale, scale, bias, dtype)
    kernel: Any = _gemm("gemm_a8w8")
    output: Tensor = kernel(XQ=rows, WQ=weight, x_scale=row_scale, w_scale=scale.view(1, -1), bias=bias, dtype=dtype)
    return output


def _shuffled_linear(
    rows: Tensor, weight: Tensor, row_scale: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if rows.numel() == 0:
        return _shape(rows, weight, row_scale, scale, bias, dtype)
    kernel: Any = _gemm("gemm_a8w8_bpreshuffle")
    output: Tensor = kernel(XQ=rows, WQ=weight, x_scale=row_scale, w_scale=scale.view(1, -1), bias=None, dtype=dtype)
    return output if bias is None else output.add_(bias)


def _shape(
    rows: Tensor, weight: Tensor, row_scale: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return row_scale.new_empty((rows.shape[0], weight.shape[0]), dtype=dtype)


_ARGUMENTS = "Tensor rows, Tensor weight, Tensor row_scale, Tensor scale, Tensor? bias, ScalarType dtype"
_traced = opaque(f"aiter_quantized_linear({_ARGUMENTS}) -> Tensor", _linear, _shape)
_traced_shuffled = opaque(f"aiter_shuffled_quantized_linear({_ARGUMENTS}) -> Tensor", _shuffled_linear, _shape)
