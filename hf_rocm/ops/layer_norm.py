"""add_layer_norm: the LayerNorm of a residual sum, and the sum itself if it is needed.

Encoders apply it after attention and after the MLP (BERT, which needs only the norm), or before the MLP (ViT, which
also needs the sum). One operation reads both terms once; separate operations write the sum and read it again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, compiler

from hf_rocm import options
from hf_rocm.device import Device
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.probe_cases import LENGTH, Draw
from hf_rocm.ops.registry import Case, Implementation, Operation, refuses_nothing
from hf_rocm.ops.specs.pointwise import LayerNormSpec
from hf_rocm.ops.triton import norm as triton
from hf_rocm.ops.triton.detect import checked as checked_triton
from hf_rocm.options import Switch


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float, keep_sum: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(layer_norm(x + residual), x + residual), the norm over the last dim, accumulated in fp32 (fp64 for fp64).

    x, residual: [..., D], one dtype; weight, bias: [D], one dtype. keep_sum: whether to return the sum; if not, the
    second value is None. The sum is rounded before it is normalised. Returns new tensors [..., D]. Ba et al. 2016,
    eq. 3.
    """
    grad = torch.is_grad_enabled() and (
        x.requires_grad or residual.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    dtype, weight_dtype, device, dim, biased = x.dtype, weight.dtype, x.device, x.shape[-1], bias is not None
    spec = (dtype, weight_dtype, device, dim, biased, keep_sum, grad)
    serve = _operation.traced(spec) if compiling() or compiler._is_compiling_flag else _operation.calls[spec]
    normed, total = serve(x, residual, weight, bias, eps, keep_sum)
    return normed, total if keep_sum else None


def may_serve() -> bool:
    """Whether the options allow one operation for sum and norm. They don't if they require aiter, which has none."""
    current = options.current()
    return current.aiter["rms_norm"] is not Switch.REQUIRED and current.tier("rms_norm") != "aiter"


def torch_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, keep_sum: bool
) -> tuple[Tensor, Tensor]:
    """PyTorch's sum, then its norm: bitwise equal to the separate layers. Without keep_sum, the sum is empty."""
    total = x + residual
    return F.layer_norm(total, weight.shape, weight, bias, eps), total if keep_sum else total.new_empty(0)


def eager_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, keep_sum: bool
) -> tuple[Tensor, Tensor]:
    """The oracle: the sum, then the formula, rounded once at the end."""
    total = x + residual
    values = total.to(torch.promote_types(x.dtype, torch.float32))
    centred = values - values.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.to(values.dtype)
    if bias is not None:
        normed = normed + bias.to(values.dtype)
    return normed.to(x.dtype), total if keep_sum else total.new_empty(0)


def _torch_refuses(spec: LayerNormSpec, device: Device) -> str | None:
    if spec.weight_dtype != spec.dtype:
        return f"F.layer_norm needs one dtype, got {spec.dtype} and a weight of {spec.weight_dtype}"
    return None


def _cases(spec: LayerNormSpec) -> Iterator[Case]:
    draw = Draw(spec.dtype, spec.device)
    for m in (1, LENGTH):
        weight = draw(spec.dim).to(spec.weight_dtype)
        bias = draw(spec.dim).to(spec.weight_dtype) if spec.biased else None
        yield Case((draw(m, spec.dim) + 1.0, draw(m, spec.dim), weight, bias), (1e-5, spec.keep_sum))


_NAME = "layer_norm_kernel"
_operation = Operation("add_layer_norm", LayerNormSpec, _cases, family="rms_norm", recorded=(0, 2))
_operation.register(
    Implementation(
        "triton", _NAME, triton.layer_refuses, triton.add_layer_norm, checked_triton("add_layer_norm", _NAME)
    )
)
_operation.register(Implementation("torch", "add, F.layer_norm", _torch_refuses, torch_add_layer_norm))
_operation.register(Implementation("eager", "add, formula", refuses_nothing, eager_add_layer_norm))
