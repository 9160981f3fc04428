"""rms_norm: RMS normalisation of the last dim, plain or in Gemma's (1 + w) form."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rocm.device import Device
from hf_rocm.ops.aiter import norm as aiter
from hf_rocm.ops.aiter.detect import checked
from hf_rocm.ops.registry import Implementation, Operation, refuses_nothing, route
from hf_rocm.ops.triton import detect as triton_detect
from hf_rocm.ops.triton import norm as triton


class NormSpec(NamedTuple):
    """What the choice of a norm depends on."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    dim: int
    one_plus: bool
    grad: bool


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, one_plus: bool = False) -> Tensor:
    """x / sqrt(mean(x²) + eps) · w over the last dim, accumulated in fp32 (fp64 for fp64).

    x: [..., D] floating; weight: [D]. one_plus: multiply by (1 + w), as Gemma's checkpoints expect.
    Returns [..., D] in x's dtype. Zhang and Sennrich 2019, eq. 4.
    """
    grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    key = (x.dtype, weight.dtype, x.device, x.shape[-1], one_plus, grad)
    result: Tensor = route(_operation, key, x, weight)(x, weight, eps, one_plus)
    return result


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
    """PyTorch's own; (1 + w) is formed in fp32, since rounding it to bf16 would lose small weights."""
    if one_plus:
        return F.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), eps).to(x.dtype)
    normed = F.rms_norm(x, weight.shape, weight, eps)
    return normed if normed.dtype == x.dtype else normed.to(x.dtype)  # autocast may widen it; stock's norm doesn't


def eager_rms_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
    """The oracle: the formula, step by step, rounded once at the end."""
    wide = torch.promote_types(x.dtype, torch.float32)
    values = x.to(wide)
    scale = weight.to(wide)
    if one_plus:
        scale = 1.0 + scale
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (normed * scale).to(x.dtype)


def torch_refuses(spec: NormSpec, device: Device) -> str | None:
    if not spec.one_plus and spec.weight_dtype != spec.dtype:
        return f"F.rms_norm needs one dtype, got {spec.dtype} and a weight of {spec.weight_dtype}"
    if spec.one_plus and spec.dtype == torch.float64:
        return "the (1 + w) form is computed in fp32, which would round fp64"
    return None


_operation = Operation("rms_norm", NormSpec)
_operation.register(Implementation("aiter", "rms_norm", aiter.refuses, aiter.rms_norm, checked("rms_norm", "rms_norm")))
_operation.register(
    Implementation(
        "triton",
        "rms_norm_kernel",
        triton.refuses,
        triton.rms_norm,
        triton_detect.checked("rms_norm", "rms_norm_kernel"),
    )
)
_operation.register(Implementation("torch", "F.rms_norm", torch_refuses, torch_rms_norm))
_operation.register(Implementation("eager", "formula", refuses_nothing, eager_rms_norm))
