"""RMSNorm through aiter's `rms_norm`; Gemma's (1 + w) through `rmsnorm`, in the releases whose `rmsnorm` supports it.

The norm of a residual sum is computed by `rmsnorm2d_fwd_with_add`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_rocm.ops.aiter import contract, detect
from hf_rocm.ops.aiter.contract import why_not
from hf_rocm.ops.aiter.layout import rows
from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.fakes import like, two_like

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.specs.pointwise import NormSpec


# Above this dim aiter uses another kernel, which has no (1 + w) form.
LARGEST_GEMMA = 8192


def refuses(spec: NormSpec, device: Device) -> str | None:
    return (
        detect.unavailable(device, portable=True)
        or _limits(spec)
        or why_not(_gemma_norm() if spec.one_plus else _rms_norm())
    )


def _limits(spec: NormSpec) -> str | None:
    if spec.grad:
        return "rms_norm has no gradient"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"rms_norm supports fp16 and bf16, not {spec.dtype}"
    if spec.weight_dtype != spec.dtype:
        return f"rms_norm would read a weight of {spec.weight_dtype} as {spec.dtype}"
    if spec.dim % 8:
        return f"rms_norm needs a dim that is a multiple of 8, got {spec.dim}"
    if spec.one_plus and spec.dim > LARGEST_GEMMA:
        return f"rmsnorm has the (1 + w) form up to a dim of {LARGEST_GEMMA}, got {spec.dim}"
    return None


def add_refuses(spec: NormSpec, device: Device) -> str | None:
    """Why aiter can't compute the residual sum and the norm in one kernel, or None."""
    return detect.unavailable(device, portable=True) or _limits(spec) or why_not(_add_norm(spec.one_plus))


def rms_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
    """See `hf_rocm.ops.rms_norm`."""
    result: Tensor = _traced(x, weight, eps, one_plus)
    return result


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, one_plus: bool) -> tuple[Tensor, Tensor]:
    """See `hf_rocm.ops.add_rms_norm`."""
    result: tuple[Tensor, Tensor] = _traced_add(x, residual, weight, eps, one_plus)
    return result


def _add_norm(one_plus: bool) -> contract.Call | str:
    passed = frozenset(("out", "input", "residual_in", "residual_out", "weight", "epsilon"))
    passed |= {"gemma_norm"} if one_plus else frozenset()
    bound = contract.operator("rmsnorm2d_fwd_with_add", passed)
    # in some releases this is a plain function that chooses among operators
    return contract.function("rmsnorm2d_fwd_with_add", passed) if isinstance(bound, str) else bound


def _rms_norm() -> contract.Call | str:
    return contract.operator("rms_norm", frozenset(("input", "weight", "epsilon")))


def _gemma_norm() -> contract.Call | str:
    return contract.operator("rmsnorm", frozenset(("out", "input", "weight", "epsilon", "gemma_norm")))


def _forward(x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
    if x.numel() == 0:
        return torch.empty_like(x)
    matrix, weight = rows(x), weight.contiguous()
    kernel: Any = _gemma_norm() if one_plus else _rms_norm()
    if one_plus:
        output = torch.empty_like(matrix)
        kernel(out=output, input=matrix, weight=weight, epsilon=eps, gemma_norm=True)
    else:
        output = kernel(input=matrix, weight=weight, epsilon=eps)
    return output.view(x.shape)


def _add_forward(x: Tensor, residual: Tensor, weight: Tensor, eps: float, one_plus: bool) -> tuple[Tensor, Tensor]:
    output, total = two_like(x)
    if x.numel():
        kernel: Any = _add_norm(one_plus)
        further = {"gemma_norm": True} if one_plus else {}
        kernel(
            out=output.view(-1, x.shape[-1]),
            input=rows(x),
            residual_in=rows(residual),
            residual_out=total.view(-1, x.shape[-1]),
            weight=weight.contiguous(),
            epsilon=eps,
            **further,
        )
    return output, total


_traced = opaque("aiter_rms_norm(Tensor x, Tensor weight, float eps, bool one_plus) -> Tensor", _forward, like)
_traced_add = opaque(
    "aiter_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, bool one_plus) -> (Tensor, Tensor)",
    _add_forward,
    two_like,
)
