"""The gate of a gated MLP through `silu_and_mul`, `gelu_and_mul` and `gelu_tanh_and_mul`.

These operators don't check their arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_rocm.ops.aiter import contract, detect
from hf_rocm.ops.aiter.contract import why_not
from hf_rocm.ops.aiter.layout import rows
from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.fakes import half

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.specs.pointwise import ActivationSpec


def refuses(spec: ActivationSpec, device: Device) -> str | None:
    reason = detect.unavailable(device, portable=True)
    if reason is not None:
        return reason
    if spec.activation == "clamped_swiglu" or spec.interleaved:
        return "aiter has no clamped activation, and none for interleaved gates"
    if spec.grad:
        return f"{spec.activation}_and_mul has no gradient"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"{spec.activation}_and_mul supports fp16 and bf16, not {spec.dtype}"
    if spec.dim % 8:
        return f"{spec.activation}_and_mul needs a dim that is a multiple of 8, got {spec.dim}"
    return why_not(_kernel(spec.activation))


def act_and_mul(x: Tensor, activation: str, interleaved: bool, limit: float, alpha: float) -> Tensor:
    """See `hf_rocm.ops.act_and_mul`; never clamped or interleaved here."""
    result: Tensor = _traced(x, activation)
    return result


def _kernel(activation: str) -> contract.Call | str:
    return contract.operator(f"{activation}_and_mul", frozenset(("out", "input")), {"limit": 0.0})


def _act_and_mul(x: Tensor, activation: str) -> Tensor:
    out = half(x)
    if out.numel():
        kernel: Any = _kernel(activation)
        kernel(out=out.view(-1, out.shape[-1]), input=rows(x))
    return out


_traced = opaque("aiter_act_and_mul(Tensor x, str activation) -> Tensor", _act_and_mul, half)
