"""RMSNorm and LayerNorm through hf_rocm's kernels: a program normalises one wide row or several narrow rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.fakes import like, two_like
from hf_rocm.ops.triton import detect
from hf_rocm.ops.triton.launch import cached, form, forms_of, launch, power_of_two, warps

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.specs.pointwise import LayerNormSpec, NormAddSpec, NormSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A row must fit into the registers of one workgroup.
WIDEST = 32768
# A program normalises several rows of a LayerNorm only if the grid still has about this many programs or more.
PROGRAMS = 256


def refuses(spec: NormSpec | NormAddSpec, device: Device) -> str | None:
    """Why the kernel can't serve this norm, with or without a residual sum, or None."""
    return _limits(spec, one_dtype=not spec.one_plus) or detect.unavailable(device)


def layer_refuses(spec: LayerNormSpec, device: Device) -> str | None:
    """Why the kernel can't serve the LayerNorm of a residual sum, or None."""
    return _limits(spec, one_dtype=True) or detect.unavailable(device)


def _limits(spec: NormSpec | NormAddSpec | LayerNormSpec, *, one_dtype: bool) -> str | None:
    if spec.grad:
        return "the norm kernel has no gradient"
    if spec.dtype not in DTYPES or spec.weight_dtype not in DTYPES:
        return f"the norm kernel supports fp32, bf16 and fp16, not {spec.dtype} with a weight of {spec.weight_dtype}"
    if one_dtype and spec.weight_dtype != spec.dtype:
        return f"the norm kernel needs one dtype, got {spec.dtype} and a weight of {spec.weight_dtype}"
    if spec.dim > WIDEST:
        return f"the norm kernel takes rows of at most {WIDEST} elements, got {spec.dim}"
    return None


def rms_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
    """See `hf_rocm.ops.rms_norm`. Rounds like transformers' layers: without (1 + w), also before w is applied."""
    result: Tensor = _traced(x, weight, eps, one_plus)
    return result


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, one_plus: bool) -> tuple[Tensor, Tensor]:
    """See `hf_rocm.ops.add_rms_norm`. The sum is rounded before it is normalised, as in two separate operations."""
    result: tuple[Tensor, Tensor] = _traced_add(x, residual, weight, eps, one_plus)
    return result


def norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    then_weight: Tensor | None,
    eps: float,
    then_eps: float,
    one_plus: bool,
) -> tuple[Tensor, Tensor]:
    """See `hf_rocm.ops.norm_add`. Without a second norm, the first result is empty."""
    result: tuple[Tensor, Tensor] = _traced_norm_add(x, residual, weight, then_weight, eps, then_eps, one_plus)
    return result


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, keep_sum: bool
) -> tuple[Tensor, Tensor]:
    """See `hf_rocm.ops.add_layer_norm`. Without keep_sum, the second result is empty."""
    result: tuple[Tensor, Tensor] = _traced_layer(x, residual, weight, bias, eps, keep_sum)
    return result


@cached
def tile(rows: int, dim: int) -> tuple[int, int, int]:
    """(rows, columns, threads) of a program, all powers of two."""
    block = power_of_two(dim)
    block_rows = min(max(1, 2048 // block), power_of_two(rows))
    return block_rows, block, min(1024, max(64, block_rows * block // 16))


def _forward(x: Tensor, weight: Tensor, eps: float, one_plus: bool, order: Tensor | None = None) -> Tensor:
    out = like(x)
    if out.numel():
        strides = _two_strides(x)
        if strides is None:
            x, strides = x.contiguous(), (x.shape[-1], 1, 0)
        _launch(x, None, weight, out, None, strides, eps, one_plus, order=order)
    return out


def reordered_rms_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool, order: Tensor) -> Tensor:
    """rms_norm(x)[..., order] in one kernel. Can't be traced."""
    return _forward(x, weight, eps, one_plus, order)


def _add_forward(x: Tensor, residual: Tensor, weight: Tensor, eps: float, one_plus: bool) -> tuple[Tensor, Tensor]:
    out, total = two_like(x)
    if out.numel():
        _launch(x.contiguous(), residual.contiguous(), weight, out, total, (x.shape[-1], 1, 0), eps, one_plus)
    return out, total


def _norm_add_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    then_weight: Tensor | None,
    eps: float,
    then_eps: float,
    one_plus: bool,
) -> tuple[Tensor, Tensor]:
    out, total = _normed_sum(x, residual, weight, then_weight)
    if total.numel():
        x, residual, strides = x.contiguous(), residual.contiguous(), (x.shape[-1], 1, 0)
        _launch(x, residual, then_weight, out, total, strides, then_eps, one_plus, weight, eps)
    return out, total


def _normed_sum(
    x: Tensor, residual: Tensor, weight: Tensor, then_weight: Tensor | None, *_: object
) -> tuple[Tensor, Tensor]:
    return (x.new_empty(0) if then_weight is None else like(x)), like(x)


def _layer_forward(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, keep_sum: bool
) -> tuple[Tensor, Tensor]:
    out, total = _layer_and_sum(x, residual, weight, bias, eps, keep_sum)
    if out.numel():
        from hf_rocm.ops.triton.kernels.norm import layer_norm_kernel

        x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        dim = x.shape[-1]
        rows = x.numel() // dim
        block_rows, block, threads = tile(rows // PROGRAMS, dim)
        tensors = x, residual, weight, bias, out, total if keep_sum else None
        launch(
            layer_norm_kernel,
            (-(-rows // block_rows),),
            (*tensors, rows, float(eps)),
            {"DIM": dim, "ROWS": block_rows, "BLOCK": block},
            num_warps=warps(threads, x.device),
            forms=(*forms_of(*tensors), form(rows)),
        )
    return out, total


def _layer_and_sum(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, keep_sum: bool
) -> tuple[Tensor, Tensor]:
    return like(x), like(x) if keep_sum else x.new_empty(0)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    total: Tensor | None,
    strides: tuple[int, int, int],
    eps: float,
    one_plus: bool,
    before: Tensor | None = None,
    before_eps: float = 0.0,
    order: Tensor | None = None,
) -> None:
    from hf_rocm.ops.triton.kernels.norm import rms_norm_kernel

    dim = x.shape[-1]
    rows = x.numel() // dim
    block_rows, block, threads = tile(rows, dim)
    weights = tuple(None if one is None else one.contiguous() for one in (weight, before))
    tensors = x, residual, weights[0], None if weight is None else out, total, weights[1]
    if order is not None:
        order = order.contiguous()
    launch(
        rms_norm_kernel,
        (-(-rows // block_rows),),
        (*tensors[:5], rows, *strides, float(eps), weights[1], float(before_eps), order),
        {"DIM": dim, "ONE_PLUS": one_plus, "ROWS": block_rows, "BLOCK": block},
        num_warps=warps(threads, x.device),
        forms=(*forms_of(*tensors, order), form(rows), *strides),
    )


def _two_strides(x: Tensor) -> tuple[int, int, int] | None:
    """(outer stride, inner rows, inner stride) of the rows of x, or None if two strides can't describe them.

    Two strides describe the heads of a fused projection, so the norm of queries and keys needs no copy.
    """
    if x.is_contiguous():
        return x.shape[-1], 1, 0
    sizes, strides = x.shape[:-1], x.stride()
    if strides[-1] != 1 or not sizes:
        return None
    for dim in range(len(sizes) - 2):
        if sizes[dim] > 1 and strides[dim] != sizes[dim + 1] * strides[dim + 1]:
            return None
    if len(sizes) == 1:
        return strides[0], 1, 0
    return strides[-3], sizes[-1], strides[-2]


_traced = opaque("triton_rms_norm(Tensor x, Tensor weight, float eps, bool one_plus) -> Tensor", _forward, like)
_traced_add = opaque(
    "triton_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, bool one_plus) -> (Tensor, Tensor)",
    _add_forward,
    two_like,
)
_traced_norm_add = opaque(
    "triton_norm_add(Tensor x, Tensor residual, Tensor weight, Tensor? then_weight, float eps, float then_eps, "
    "bool one_plus) -> (Tensor, Tensor)",
    _norm_add_forward,
    _normed_sum,
)
_traced_layer = opaque(
    "triton_add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps, bool keep_sum) -> "
    "(Tensor, Tensor)",
    _layer_forward,
    _layer_and_sum,
)
