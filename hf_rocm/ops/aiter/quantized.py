"""8-bit linear layers through aiter's `gemm_a8w8`, and `gemm_a8w8_bpreshuffle` for shuffled weights.

`round_rows` quantises the rows of x. aiter's own quantisation kernel is not used: it divides by the largest magnitude,
so a row of zeros becomes NaN, and it ignores NaN when it computes that magnitude.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_rocm.ops.aiter import contract, detect
from hf_rocm.ops.aiter.contract import why_not
from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.eight_bit import INT8, fp8_of
from hf_rocm.ops.round_rows import rounded_input

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.specs.quantized import QuantizedCall, QuantizedSpec

# The tiles of `gemm_a8w8_bpreshuffle` have up to 256 rows and are not padded. Only a few of its kernels, which are
# rarely used, support K below 512.
TILE, SHORTEST = 256, 512


def refuses(spec: QuantizedSpec, device: Device) -> str | None:
    reason = _common_refusal(spec, device)
    if reason is not None:
        return reason
    if spec.shuffled:
        return "gemm_a8w8 reads weights in plain order, but this weight is shuffled"
    if spec.k % 16 or spec.n % 8:
        return f"gemm_a8w8 needs K to be a multiple of 16 and N of 8, got {spec.n} × {spec.k}"
    return why_not(_gemm("gemm_a8w8"))


def shuffled_refuses(spec: QuantizedSpec, device: Device) -> str | None:
    reason = _common_refusal(spec, device)
    if reason is not None:
        return reason
    if not spec.shuffled:
        return "gemm_a8w8_bpreshuffle reads shuffled weights, but this weight is in plain order"
    if spec.format == INT8:
        return "gemm_a8w8_bpreshuffle supports only fp8"
    if spec.n % TILE or spec.k % TILE or spec.k < SHORTEST:
        requirement = f"N and K to be multiples of {TILE} and K ≥ {SHORTEST}"
        return f"gemm_a8w8_bpreshuffle needs {requirement}, got {spec.n} × {spec.k}"
    return why_not(_gemm("gemm_a8w8_bpreshuffle"))


def _common_refusal(spec: QuantizedSpec, device: Device) -> str | None:
    reason = detect.unavailable(device)
    if reason is not None:
        return reason
    if not spec.round_input:
        return "aiter's GEMMs need x quantised to 8 bits, and this call doesn't quantise it"
    if spec.dtype not in (torch.float16, torch.bfloat16) or spec.bias_dtype not in (None, spec.dtype):
        return f"gemm_a8w8 returns fp16 or bf16 and needs a bias of its dtype, got {spec.dtype} and {spec.bias_dtype}"
    native = fp8_of(device)
    if spec.format != INT8 and spec.format != native:
        supported = f"; it supports {native}" if native else ""
        return f"aiter has no GEMM for {spec.format} on {device.arch}{supported}"
    return None


def linear(call: QuantizedCall) -> Tensor:
    """See `hf_rocm.ops.quantized_linear`."""
    return _apply(_traced, call)


def shuffled_linear(call: QuantizedCall) -> Tensor:
    """See `hf_rocm.ops.quantized_linear`; the weight is shuffled."""
    return _apply(_traced_shuffled, call)


def _apply(gemm: Callable[..., Tensor], call: QuantizedCall) -> Tensor:
    rows, row_scale = rounded_input(call)
    output = gemm(rows, call.weight, row_scale, call.scale, call.bias, call.x.dtype)
    return output.view(*call.x.shape[:-1], call.weight.shape[0])


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
