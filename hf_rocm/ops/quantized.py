"""quantized_linear: x Wᵀ + b with W in 8 bits, one scale for each of its rows, and x rounded likewise at each call.

The vendor library's 8-bit products are the torch tier; the eager tier multiplies what the 8 bits stand for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rocm.device import Device
from hf_rocm.errors import OptionError
from hf_rocm.ops import probe
from hf_rocm.ops.aiter import quantized as aiter
from hf_rocm.ops.aiter.detect import checked
from hf_rocm.ops.eight_bit import INT8, quantize_rows, unshuffle_rows
from hf_rocm.ops.registry import Implementation, Operation, refuses_nothing, route


class QuantizedSpec(NamedTuple):
    """What the choice of an implementation depends on. k, n: a GEMM of [M, K] by [N, K]ᵀ."""

    dtype: torch.dtype  # of x
    format: torch.dtype  # of the weight
    device: torch.device
    n: int
    k: int
    bias_dtype: torch.dtype | None
    shuffled: bool

    @property
    def grad(self) -> bool:
        """There is no gradient: see `quantized_linear`."""
        return False


def quantized_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, shuffled: bool = False
) -> Tensor:
    """x (s · W)ᵀ + b, with the rows of x rounded to the format of W too.

    x: [..., K] fp64, fp32, fp16 or bf16; weight: [N, K] int8 or fp8; scale: [N] fp32; bias: [N] or None. shuffled: the
    weight is in the order of `eight_bit.shuffle_rows`. Returns [..., N] in x's dtype.
    Raises `OptionError` where gradients are asked for.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        raise OptionError(
            "8-bit layers have no gradient, and their input requires one",
            hint="call the model under torch.no_grad(); to train, load it without quantize=",
        )
    n, k = weight.shape
    bias_dtype = None if bias is None else bias.dtype
    key = (x.dtype, weight.dtype, x.device, n, k, bias_dtype, shuffled)
    result: Tensor = route(_operation, key, x, weight)(x, weight, scale, bias, weight.dtype, shuffled)
    return result


def eager_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, format: torch.dtype, shuffled: bool
) -> Tensor:
    """The oracle: the numbers behind the 8 bits, multiplied in at least fp32 and rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows, row_scale = quantize_rows(x, format)
    weight = unshuffle_rows(weight) if shuffled else weight
    product = torch.matmul(rows.to(wide), weight.to(wide).t()) * row_scale * scale.to(wide)
    return (product if bias is None else product + bias.to(wide)).to(x.dtype)


def scaled_mm(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, format: torch.dtype, shuffled: bool
) -> Tensor:
    """fp8 with the scales inside the product."""
    rows, row_scale = _rows(x, format)
    if rows.shape[0] == 0:
        return x.new_empty((*x.shape[:-1], weight.shape[0]))
    product = torch._scaled_mm(
        rows,
        _plain(weight, shuffled).t(),
        scale_a=row_scale,
        scale_b=scale.view(1, -1),
        out_dtype=x.dtype,
    )
    return _finish(product if bias is None else product + bias.to(x.dtype), x)


def scaled_mm_then_scale(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, format: torch.dtype, shuffled: bool
) -> Tensor:
    """fp8 with the scales after the product, which more devices and dtypes have."""
    rows, row_scale = _rows(x, format)
    if rows.shape[0] == 0:
        return x.new_empty((*x.shape[:-1], weight.shape[0]))
    one = torch.ones((), dtype=torch.float32, device=x.device)
    product = torch._scaled_mm(rows, _plain(weight, shuffled).t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    return _scaled(product, row_scale, scale, bias, x)


# Of the vendor libraries' int8 products; the missing rows are filled with zeros.
_FEWEST_ROWS = 17


def int_mm(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, format: torch.dtype, shuffled: bool
) -> Tensor:
    """int8, summed without rounding in int32."""
    rows, row_scale = _rows(x, format)
    m = rows.shape[0]
    if x.is_cuda and m < _FEWEST_ROWS:
        rows = F.pad(rows, (0, 0, 0, 32 - m))
    product = torch._int_mm(rows, _plain(weight, shuffled).t())[:m].float()
    return _scaled(product, row_scale, scale, bias, x)


def _rows(x: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, scale = quantize_rows(x.reshape(-1, x.shape[-1]), format)
    return rows.contiguous(), scale.contiguous()


def _plain(weight: Tensor, shuffled: bool) -> Tensor:
    return unshuffle_rows(weight) if shuffled else weight


def _scaled(product: Tensor, row_scale: Tensor, scale: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    product = product * row_scale * scale
    return _finish((product if bias is None else product + bias).to(x.dtype), x)


def _finish(product: Tensor, x: Tensor) -> Tensor:
    return product.view(*x.shape[:-1], product.shape[-1])


def _fp8_refuses(spec: QuantizedSpec, device: Device) -> str | None:
    if spec.format == INT8:
        return "_scaled_mm is for fp8"
    if not hasattr(torch, "_scaled_mm"):
        return f"PyTorch {torch.__version__} has no _scaled_mm"
    if spec.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"_scaled_mm gives at most fp32, not {spec.dtype}"
    if device.kind == "cuda" and spec.dtype == torch.float32:
        return "on a GPU the sums of _scaled_mm have fewer bits than fp32"
    if device.kind == "cuda" and (spec.n % 16 or spec.k % 16):
        return f"on a GPU _scaled_mm needs N and K to be multiples of 16, got {spec.n} × {spec.k}"
    if device.kind == "cuda" and not device.rocm:
        major, minor = torch.cuda.get_device_capability(spec.device)
        if (major, minor) < (8, 9):
            return f"fp8 products begin with compute capability 8.9, and this is {major}.{minor}"
    return None


def _scaled_inside_refuses(spec: QuantizedSpec, device: Device) -> str | None:
    if spec.dtype != torch.bfloat16:
        return f"with a scale for each row _scaled_mm gives bf16, not {spec.dtype}"
    return _fp8_refuses(spec, device)


def _int8_refuses(spec: QuantizedSpec, device: Device) -> str | None:
    if spec.format != INT8:
        return "_int_mm is for int8"
    if not hasattr(torch, "_int_mm"):
        return f"PyTorch {torch.__version__} has no _int_mm"
    if spec.dtype == torch.float64:
        return "its scales are fp32"
    if device.kind == "cuda" and (spec.n % 8 or spec.k % 8):
        return f"on a GPU _int_mm needs N and K to be multiples of 8, got {spec.n} × {spec.k}"
    return None


def _checked(name: str) -> probe.Probe:
    """PyTorch's private products differ by device and release: a small one of the same divisibility is checked."""

    def format(spec: QuantizedSpec) -> str:
        return str(spec.format)  # one that a release lacks says nothing about another

    check = probe.checked_here("quantized_linear", name, tier="torch", apart=format)

    def small(spec: QuantizedSpec, device: Device) -> str | None:
        return check(spec._replace(n=64 + spec.n % 32, k=128 + spec.k % 32), device)

    return small


_operation = Operation("quantized_linear", QuantizedSpec, family="linear")
for _name, _refuses, _call in (
    ("gemm_a8w8_bpreshuffle", aiter.shuffled_refuses, aiter.shuffled_linear),
    ("gemm_a8w8", aiter.refuses, aiter.linear),
):
    _operation.register(Implementation("aiter", _name, _refuses, _call, checked("quantized_linear", _name)))
for _name, _refuses, _call in (
    ("_scaled_mm", _scaled_inside_refuses, scaled_mm),
    ("_scaled_mm, scaled after", _fp8_refuses, scaled_mm_then_scale),
    ("_int_mm", _int8_refuses, int_mm),
):
    _operation.register(Implementation("torch", _name, _refuses, _call, _checked(_name)))
_operation.register(Implementation("eager", "dequantize, matmul", refuses_nothing, eager_linear))


def choose(spec: QuantizedSpec) -> tuple[str, str]:
    """(tier, name) of what will serve this specification; it is checked if it never was."""
    chosen = _operation.choose(tuple(spec)).implementation
    return chosen.tier, chosen.name


def shuffle_refuses(spec: QuantizedSpec, device: Device) -> str | None:
    """Why a weight of this kind gains nothing from aiter's own order."""
    return aiter.shuffled_refuses(spec._replace(shuffled=True), device)
