"""The specification of `quantized_linear`, the arguments of its implementations, and the implementations in PyTorch.

The torch tier is the BLAS library: 8-bit products, for which the rows of x are rounded to 8 bits in every call, or the
product of a dequantised weight. The eager tier multiplies the dequantised numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rocm.device import Device
from hf_rocm.ops.eight_bit import BLOCK, INT8, dequantize_blocks, dequantize_rows, quantize_rows, unshuffle_rows
from hf_rocm.ops.four_bit import INT4, Nested, dequantize_groups
from hf_rocm.ops.pointwise import act_and_mul, rms_norm

MANY = 0  # in a specification: more than `quantized.FEW` rows
_STEP = 256  # a multiple of the number of rows that share a scale, or a factor of scales
_AT_ONCE = 2**24  # numbers that are dequantised at once: 64 MiB in fp32


class QuantizedSpec(NamedTuple):
    """The specification of a call, from which an implementation is selected. k, n: a GEMM of [M, K] by [N, K]ᵀ."""

    dtype: torch.dtype  # of x
    format: torch.dtype  # of the weight
    device: torch.device
    n: int
    k: int
    bias_dtype: torch.dtype | None
    shuffled: bool
    round_input: bool = True
    group: int = 0  # numbers of a row that share a scale; 0: all. With 8 bits, as many rows share it
    norm_dtype: torch.dtype | None = None
    one_plus: bool = False
    activation: str | None = None
    residual: bool = False
    rows: int = MANY  # M rounded up to a power of two, or MANY; MANY if x is rounded
    scale_dtype: torch.dtype | None = None  # the dtype of the groups' scales; None: bf16
    zeros: bool = False  # whether groups have zero points
    code: str | None = None  # the table of 4-bit numbers, see `ops.four_bit`; None: integers

    @property
    def grad(self) -> bool:
        """False: quantised layers have no gradient, see `quantized_linear`."""
        return False


class QuantizedCall(NamedTuple):
    """The arguments of `quantized_linear` as its implementations take them, and the format of the weight."""

    x: Tensor
    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    format: torch.dtype
    shuffled: bool
    round_input: bool = True
    norm_weight: Tensor | None = None
    residual: Tensor | None = None
    eps: float = 0.0
    one_plus: bool = False
    activation: str | None = None
    zeros: Tensor | None = None
    code: str | None = None
    nested: Nested | None = None

    def rows(self) -> tuple[Tensor, Tensor]:
        """The rows of x [M, K], rounded to the format, and their scales [M, 1]."""
        rows, scale = quantize_rows(self.x.reshape(-1, self.x.shape[-1]), self.format)
        return rows.contiguous(), scale.contiguous()

    def plain_weight(self) -> Tensor:
        """The 8-bit weight in its plain order."""
        return unshuffle_rows(self.weight) if self.shuffled else self.weight

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] in this dtype."""
        weight = self.weight if self.format == INT4 else self.plain_weight()
        step = max(1, _AT_ONCE // max(1, self.x.shape[-1]) // _STEP) * _STEP
        parts = [
            self._decoded(weight[start : start + step], slice(start, start + step), dtype)
            for start in range(0, max(1, len(weight)), step)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decoded(self, rows: Tensor, place: slice, dtype: torch.dtype) -> Tensor:
        if self.format != INT4 and self.scale.dim() == 2:
            return dequantize_blocks(rows, self.scale[place.start // BLOCK : place.stop // BLOCK], dtype)
        if self.format != INT4:
            return dequantize_rows(rows, self.scale[place], dtype)
        zeros, nested = None if self.zeros is None else self.zeros[place], self.nested
        if nested is not None:
            nested = nested.of_rows(place, self.scale.shape[1])
        return dequantize_groups(rows, self.scale[place], dtype, zeros, self.code, nested)


def one_by_one(
    multiply: Callable[[QuantizedCall], Tensor],
    norm: Callable[..., Tensor] = rms_norm,
    gate: Callable[..., Tensor] = act_and_mul,
) -> Callable[[QuantizedCall], Tensor]:
    """The norm, this product, the gate and the sum, one after the other."""

    def quantized_linear(call: QuantizedCall) -> Tensor:
        if call.norm_weight is not None:
            call = call._replace(x=norm(call.x, call.norm_weight, eps=call.eps, one_plus=call.one_plus))
        product = multiply(call)
        if call.activation is not None:
            product = gate(product, activation=call.activation)
        return product if call.residual is None else call.residual.to(product.dtype) + product

    return quantized_linear


def eager_linear(call: QuantizedCall) -> Tensor:
    """The oracle: the dequantised numbers, multiplied in at least fp32 and rounded once."""
    x, bias = call.x, call.bias
    wide = torch.promote_types(x.dtype, torch.float32)
    if call.round_input:
        rows, row_scale = quantize_rows(x, call.format)
        product = torch.matmul(rows.to(wide), call.plain_weight().to(wide).t()) * row_scale * call.scale.to(wide)
    else:
        product = torch.matmul(x.to(wide), call.dequantized(wide).t())
    return (product if bias is None else product + bias.to(wide)).to(x.dtype)


def dequantized_linear(call: QuantizedCall) -> Tensor:
    """x times the weight, which is dequantised to x's dtype for this call."""
    bias = call.bias
    return F.linear(call.x, call.dequantized(call.x.dtype), None if bias is None else bias.to(call.x.dtype))


def scaled_mm(call: QuantizedCall) -> Tensor:
    """An fp8 product that applies the scales itself."""
    x, bias = call.x, call.bias
    rows, row_scale = call.rows()
    if rows.shape[0] == 0:
        return x.new_empty((*x.shape[:-1], call.weight.shape[0]))
    product = torch._scaled_mm(
        rows,
        call.plain_weight().t(),
        scale_a=row_scale,
        scale_b=call.scale.view(1, -1),
        out_dtype=x.dtype,
    )
    product = product if bias is None else product + bias.to(x.dtype)
    return product.view(*x.shape[:-1], product.shape[-1])


def scaled_mm_then_scale(call: QuantizedCall) -> Tensor:
    """An fp8 product, with the scales applied afterwards. More devices and dtypes support this."""
    x = call.x
    rows, row_scale = call.rows()
    if rows.shape[0] == 0:
        return x.new_empty((*x.shape[:-1], call.weight.shape[0]))
    one = torch.ones((), dtype=torch.float32, device=x.device)
    product = torch._scaled_mm(rows, call.plain_weight().t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    return _scaled(product, row_scale, call)


# The smallest M of the int8 products on a GPU; missing rows are filled with zeros.
_FEWEST_ROWS = 17


def int_mm(call: QuantizedCall) -> Tensor:
    """An int8 product, summed in int32 without rounding."""
    rows, row_scale = call.rows()
    m = rows.shape[0]
    if call.x.is_cuda and m < _FEWEST_ROWS:
        rows = F.pad(rows, (0, 0, 0, 32 - m))
    product = torch._int_mm(rows, call.plain_weight().t())[:m].float()
    return _scaled(product, row_scale, call)


def _scaled(product: Tensor, row_scale: Tensor, call: QuantizedCall) -> Tensor:
    product = product * row_scale * call.scale
    product = (product if call.bias is None else product + call.bias).to(call.x.dtype)
    return product.view(*call.x.shape[:-1], product.shape[-1])


def _rounds(spec: QuantizedSpec) -> str | None:
    return None if spec.round_input else "it multiplies rounded rows, and this call doesn't round x"


def dequantized_refuses(spec: QuantizedSpec, device: Device) -> str | None:
    return "the call rounds x" if spec.round_input else None


def fp8_refuses(spec: QuantizedSpec, device: Device) -> str | None:
    if _rounds(spec) is not None:
        return _rounds(spec)
    if spec.format == INT8:
        return "_scaled_mm is for fp8"
    if not hasattr(torch, "_scaled_mm"):
        return f"PyTorch {torch.__version__} has no _scaled_mm"
    if spec.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"_scaled_mm returns at most fp32, not {spec.dtype}"
    if device.kind == "cuda" and spec.dtype == torch.float32:
        return "on a GPU, _scaled_mm accumulates with fewer bits than fp32"
    if device.kind == "cuda" and (spec.n % 16 or spec.k % 16):
        return f"on a GPU _scaled_mm needs N and K to be multiples of 16, got {spec.n} × {spec.k}"
    if device.kind == "cuda" and not device.rocm:
        major, minor = torch.cuda.get_device_capability(spec.device)
        if (major, minor) < (8, 9):
            return f"fp8 products need compute capability 8.9 or newer, got {major}.{minor}"
    return None


def scaled_inside_refuses(spec: QuantizedSpec, device: Device) -> str | None:
    if spec.dtype != torch.bfloat16:
        return f"with a scale for each row, _scaled_mm returns bf16, not {spec.dtype}"
    return fp8_refuses(spec, device)


def int8_refuses(spec: QuantizedSpec, device: Device) -> str | None:
    if _rounds(spec) is not None:
        return _rounds(spec)
    if spec.format != INT8:
        return "_int_mm is for int8"
    if not hasattr(torch, "_int_mm"):
        return f"PyTorch {torch.__version__} has no _int_mm"
    if spec.dtype == torch.float64:
        return "its scales are fp32"
    if device.kind == "cuda" and (spec.n % 8 or spec.k % 8):
        return f"on a GPU _int_mm needs N and K to be multiples of 8, got {spec.n} × {spec.k}"
    return None
