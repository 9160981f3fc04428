"""The implementations of `quantized_linear` in PyTorch.

The torch tier calls the BLAS library: either an 8-bit GEMM, for which the rows of x are rounded to 8 bits on every
call, or a GEMM with a dequantised weight. The eager tier computes in at least fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rocm.device import Device
from hf_rocm.ops.eight_bit import INT8, quantize_rows
from hf_rocm.ops.pointwise import act_and_mul, rms_norm
from hf_rocm.ops.round_rows import rounded_input
from hf_rocm.ops.specs.quantized import QuantizedCall, QuantizedSpec


def _reorder(x: Tensor, order: Tensor) -> Tensor:
    return x.index_select(-1, order)


def one_by_one(
    multiply: Callable[[QuantizedCall], Tensor],
    norm: Callable[..., Tensor] = rms_norm,
    gate: Callable[..., Tensor] = act_and_mul,
    reorder: Callable[[Tensor, Tensor], Tensor] | None = _reorder,
) -> Callable[[QuantizedCall], Tensor]:
    """Return a function that applies the parts of a call, of which `multiply` computes the GEMM, one after another.

    reorder: reorders the columns of x; None: multiply does so.
    """

    def quantized_linear(call: QuantizedCall) -> Tensor:
        if call.norm_weight is not None:
            call = call._replace(x=norm(call.x, call.norm_weight, eps=call.eps, one_plus=call.one_plus))
        if call.order is not None and reorder is not None:
            call = call._replace(x=reorder(call.x, call.order))
        output = multiply(call)
        if call.activation is not None:
            output = gate(output, activation=call.activation)
        return output if call.residual is None else call.residual.to(output.dtype) + output

    return quantized_linear


def eager_linear(call: QuantizedCall) -> Tensor:
    """The oracle: multiply in at least fp32, and round the result once."""
    x, bias = call.x, call.bias
    wide = torch.promote_types(x.dtype, torch.float32)
    if call.round_input:
        rows, row_scale = quantize_rows(x, call.format)
        output = torch.matmul(rows.to(wide), call.plain_weight().to(wide).t()) * row_scale * call.scale.to(wide)
    else:
        output = torch.matmul(x.to(wide), call.dequantized(wide).t())
    return (output if bias is None else output + bias.to(wide)).to(x.dtype)


def dequantized_linear(call: QuantizedCall) -> Tensor:
    """x times the weight, which is dequantised to x's dtype for this call."""
    bias = call.bias
    return F.linear(call.x, call.dequantized(call.x.dtype), None if bias is None else bias.to(call.x.dtype))


def scaled_mm(call: QuantizedCall) -> Tensor:
    """An fp8 GEMM that applies the scales itself."""
    x, bias = call.x, call.bias
    rows, row_scale = rounded_input(call)
    if rows.shape[0] == 0:
        return x.new_empty((*x.shape[:-1], call.weight.shape[0]))
    output = torch._scaled_mm(
        rows,
        call.plain_weight().t(),
        scale_a=row_scale,
        scale_b=call.scale.view(1, -1),
        out_dtype=x.dtype,
    )
    output = output if bias is None else output + bias.to(x.dtype)
    return output.view(*x.shape[:-1], output.shape[-1])


def scaled_mm_then_scale(call: QuantizedCall) -> Tensor:
    """An fp8 GEMM, with the scales applied afterwards. This works on more devices and with more dtypes."""
    x = call.x
    rows, row_scale = rounded_input(call)
    if rows.shape[0] == 0:
        return x.new_empty((*x.shape[:-1], call.weight.shape[0]))
    one = torch.ones((), dtype=torch.float32, device=x.device)
    output = torch._scaled_mm(rows, call.plain_weight().t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    return _scaled(output, row_scale, call)


# The smallest M of the int8 GEMMs on a GPU. With fewer rows, x is padded with zeros to 32 rows.
_FEWEST_ROWS = 17


def int_mm(call: QuantizedCall) -> Tensor:
    """An int8 GEMM, accumulated in int32 without rounding."""
    rows, row_scale = rounded_input(call)
    m = rows.shape[0]
    if call.x.is_cuda and m < _FEWEST_ROWS:
        rows = F.pad(rows, (0, 0, 0, 32 - m))
    output = torch._int_mm(rows, call.plain_weight().t())[:m].float()
    return _scaled(output, row_scale, call)


def _scaled(output: Tensor, row_scale: Tensor, call: QuantizedCall) -> Tensor:
    output = output * row_scale * call.scale
    output = (output if call.bias is None else output + call.bias).to(call.x.dtype)
    return output.view(*call.x.shape[:-1], output.shape[-1])


def _rounds(spec: QuantizedSpec) -> str | None:
    return None if spec.round_input else "8-bit GEMMs need x quantised to 8 bits, and this call doesn't quantise it"


def dequantized_refuses(spec: QuantizedSpec, device: Device) -> str | None:
    return "the call rounds x" if spec.round_input else None


def fp8_refuses(spec: QuantizedSpec, device: Device) -> str | None:
    if _rounds(spec) is not None:
        return _rounds(spec)
    if spec.format == INT8:
        return "_scaled_mm supports only fp8"
    if not hasattr(torch, "_scaled_mm"):
        return f"PyTorch {torch.__version__} has no _scaled_mm"
    if spec.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"_scaled_mm returns at most fp32, not {spec.dtype}"
    if device.kind == "cuda" and spec.dtype == torch.float32:
        return "on a GPU, _scaled_mm accumulates with fewer bits than fp32"
    if device.kind == "cuda" and (spec.n % 16 or spec.k % 16):
        return f"on a GPU, _scaled_mm needs N and K to be multiples of 16, got {spec.n} × {spec.k}"
    if device.kind == "cuda" and not device.rocm:
        major, minor = torch.cuda.get_device_capability(spec.device)
        if (major, minor) < (8, 9):
            return f"fp8 GEMMs need compute capability 8.9 or higher, got {major}.{minor}"
    return None


def scaled_inside_refuses(spec: QuantizedSpec, device: Device) -> str | None:
    if spec.dtype != torch.bfloat16:
        return f"with a scale for each row, _scaled_mm returns bf16, not {spec.dtype}"
    return fp8_refuses(spec, device)


def int8_refuses(spec: QuantizedSpec, device: Device) -> str | None:
    if _rounds(spec) is not None:
        return _rounds(spec)
    if spec.format != INT8:
        return "_int_mm supports only int8"
    if not hasattr(torch, "_int_mm"):
        return f"PyTorch {torch.__version__} has no _int_mm"
    if spec.dtype == torch.float64:
        return "the scales of _int_mm are applied in fp32"
    if device.kind == "cuda" and (spec.n % 8 or spec.k % 8):
        return f"on a GPU, _int_mm needs N and K to be multiples of 8, got {spec.n} × {spec.k}"
    return None
