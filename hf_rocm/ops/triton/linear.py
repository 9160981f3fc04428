"""GEMMs with few rows through hf_rocm's kernels, alone or with norm, gate and residual sum.

`tiles` chooses one of two kernels and its tiles, which were measured on NVIDIA GPUs and estimated for AMD GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_rocm import options
from hf_rocm.device import describe
from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.triton import detect, norm
from hf_rocm.ops.triton.launch import in_pairs, launch, warps
from hf_rocm.ops.triton.tiles import LinearTile, linear_tile

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.specs.linear import FusedLinearSpec, LinearSpec
    from hf_rocm.ops.specs.quantized import QuantizedSpec

NAME = "few_rows"

DTYPES = (torch.bfloat16, torch.float16)
# The smallest N and K; smaller GEMMs don't matter for performance.
FEWEST = 16


def refuses(spec: LinearSpec | FusedLinearSpec, device: Device) -> str | None:
    """Why the kernels are not used for this GEMM, or None. M > 32 needs an explicit request for the triton tier."""
    return detect.unavailable(device) or _limits(spec) or _gain(spec.rows)


def fused_refuses(spec: FusedLinearSpec, device: Device) -> str | None:
    """Like `refuses`, for a fused GEMM."""
    if spec.activation is not None and spec.rows != 1 and spec.k % 16 and (device.arch or "").startswith("gfx11"):
        reason = "on RDNA 3, a wait is missing from the gated kernel's code for M > 1"
        return f"{reason}, unless K is a multiple of 16, got {spec.k}"
    return refuses(spec, device) or parts_refuse(spec)


def parts_refuse(spec: FusedLinearSpec | QuantizedSpec) -> str | None:
    """Why the norm or the gate can't be part of a GEMM with few rows, or None."""
    if spec.activation is not None and spec.n % 2:
        return f"a gate needs an even N, got {spec.n}"
    if spec.norm_dtype is not None and not spec.one_plus and spec.norm_dtype != spec.dtype:
        return f"the norm kernel needs one dtype, got {spec.dtype} and a weight of {spec.norm_dtype}"
    if spec.norm_dtype not in (None, *norm.DTYPES):
        return f"the norm's weight is {spec.norm_dtype}"
    if spec.norm_dtype is not None and spec.k > norm.WIDEST:
        return f"the norm kernel takes rows of at most {norm.WIDEST} elements, got {spec.k}"
    return None


def _limits(spec: LinearSpec | FusedLinearSpec) -> str | None:
    if spec.grad:
        return "the kernels for few rows have no gradient"
    if spec.dtype not in DTYPES:
        return f"the kernels for few rows support bf16 and fp16, not {spec.dtype}"
    if spec.weight_dtype != spec.dtype or spec.bias_dtype not in (None, spec.dtype):
        return f"the kernels need one dtype, got {spec.dtype}, {spec.weight_dtype} and a bias of {spec.bias_dtype}"
    if not spec.contiguous:
        return "the kernels for few rows need a contiguous weight"
    if spec.n < FEWEST or spec.k < FEWEST:
        return f"N and K must be at least {FEWEST}, got {spec.n} and {spec.k}"
    return None


def _gain(rows: int) -> str | None:
    """Why the vendor's BLAS library is preferred. None if it is not, or if the triton tier was requested."""
    if rows or options.current().tier("linear") == "triton":
        return None
    return "M > 32 is left to the vendor's BLAS library"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `hf_rocm.ops.linear`."""
    result: Tensor = fused_linear(x, weight, bias, None, None, 0.0, False, None)
    return result


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    one_plus: bool,
    activation: str | None,
) -> Tensor:
    out = empty_output(x, weight, bias, norm_weight, residual, eps, one_plus, activation)
    n, k = out.shape[-1], weight.shape[1]
    m = out.numel() // n
    if m == 0:
        return out
    if residual is not None:
        residual = residual.contiguous()
    from hf_rocm.ops.triton.kernels import linear as kernels

    device = describe(x.device)
    gated, normed = activation is not None, norm_weight is not None
    tile = linear_tile(m, n, k, gated, normed=normed, rocm=device.rocm, arch=device.arch)
    if norm_weight is not None and tile.matrix:
        # for several rows, a separate kernel is faster than the norm in every program of the GEMM
        x, norm_weight = norm.rms_norm(x, norm_weight, eps, one_plus), None
    x, weight = x.contiguous(), weight.contiguous()
    pairs = not tile.matrix and in_pairs(k, x, weight, norm_weight)
    before, further = norm_arguments(tile, norm_weight, eps, one_plus, pairs=pairs)
    launch(
        kernels.few_rows if tile.matrix else kernels.matrix_vector,
        (-(-n // tile.n), -(-m // tile.m)),
        (x, weight, None, bias, residual, out, m, n, k // 2 if pairs else k, *before),
        {
            "ACTIVATION": activation,
            "EVEN": k % (tile.splits * tile.k) == 0,
            "GROUP": 0,
            "SELECT": None,
            **further,
            **tile.constants(),
        },
        num_warps=warps(tile.threads, x.device),
        num_stages=tile.stages,
    )
    return out


def norm_arguments(
    tile: LinearTile, weight: Tensor | None = None, eps: float = 0.0, one_plus: bool = False, *, pairs: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The last arguments and constants of `matrix_vector`, which `few_rows` does not have."""
    if tile.matrix:
        return (), {}
    norm = None if weight is None else weight.contiguous()
    return (norm, float(eps)), {"ONE_PLUS": one_plus, "PAIRS": pairs, "AHEAD": pairs and tile.ahead}


def empty_output(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """An empty tensor of the result's shape. rest: the operator's other arguments; the last one is the activation."""
    activation = rest[-1]
    n = weight.shape[0]
    return x.new_empty((*x.shape[:-1], n if activation is None else n // 2))


# See `hf_rocm.ops.fused_linear`. Rounds where separate layers round, but not after a norm in `matrix_vector`.
fused_linear = opaque(
    "triton_fused_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? residual, float eps, "
    "bool one_plus, str? activation) -> Tensor",
    _forward,
    empty_output,
)
