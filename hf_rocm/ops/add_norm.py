"""add_rms_norm: the residual sum and the norm that follows it, in one pass where a kernel has both."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_rocm.ops.aiter import norm as aiter
from hf_rocm.ops.aiter.detect import checked
from hf_rocm.ops.norm import NormSpec, eager_rms_norm, torch_refuses, torch_rms_norm
from hf_rocm.ops.registry import Implementation, Operation, refuses_nothing, route
from hf_rocm.ops.triton import detect as triton_detect
from hf_rocm.ops.triton import norm as triton


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, one_plus: bool = False
) -> tuple[Tensor, Tensor]:
    """rms_norm(x + residual), and x + residual, which is the next residual.

    x, residual: [..., D], one dtype; weight: [D]. one_plus: see `rms_norm`. Returns two new [..., D].
    """
    grad = torch.is_grad_enabled() and (x.requires_grad or residual.requires_grad or weight.requires_grad)
    key = (x.dtype, weight.dtype, x.device, x.shape[-1], one_plus, grad)
    result: tuple[Tensor, Tensor] = route(_operation, key, x, weight)(x, residual, weight, eps, one_plus)
    return result


def torch_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, one_plus: bool
) -> tuple[Tensor, Tensor]:
    """PyTorch's sum, then its norm: bit for bit what the unfused layers compute."""
    total = x + residual
    return torch_rms_norm(total, weight, eps, one_plus), total


def eager_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, one_plus: bool
) -> tuple[Tensor, Tensor]:
    """The oracle: the sum, then the formula."""
    total = x + residual
    return eager_rms_norm(total, weight, eps, one_plus), total


_operation = Operation("add_rms_norm", NormSpec, family="rms_norm")
_operation.register(
    Implementation(
        "aiter",
        "rmsnorm2d_fwd_with_add",
        aiter.add_refuses,
        aiter.add_rms_norm,
        checked("add_rms_norm", "rmsnorm2d_fwd_with_add"),
    )
)
_operation.register(
    Implementation(
        "triton",
        "rms_norm_kernel",
        triton.refuses,
        triton.add_rms_norm,
        triton_detect.checked("add_rms_norm", "rms_norm_kernel"),
    )
)
_operation.register(Implementation("torch", "add, F.rms_norm", torch_refuses, torch_add_rms_norm))
_operation.register(Implementation("eager", "add, formula", refuses_nothing, eager_add_rms_norm))
