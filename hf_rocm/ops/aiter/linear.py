"""Linear layers through aiter's `gemm_a16w16`, which chooses among tuned, skinny and library kernels by shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rocm.ops.aiter import contract, detect
from hf_rocm.ops.aiter.contract import why_not
from hf_rocm.ops.aiter.layout import rows
from hf_rocm.ops.custom_op import opaque

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.specs.linear import LinearSpec

# Up to 0.1.7.post2 the assembly kernels ignore a bias.
BIAS_SINCE = "0.1.7.post3"
# Up to 0.1.7.post2 the attribute of a shuffled weight is ignored.
SHUFFLED_SINCE = "0.1.7.post3"


def refuses(spec: LinearSpec, device: Device) -> str | None:
    reason = detect.unavailable(device)
    if reason is not None:
        return reason
    if spec.grad:
        return "gemm_a16w16 has no gradient"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"gemm_a16w16 supports fp16 and bf16, not {spec.dtype}"
    if spec.weight_dtype != spec.dtype or spec.bias_dtype not in (None, spec.dtype):
        return f"gemm_a16w16 needs one dtype, got {spec.dtype}, {spec.weight_dtype} and a bias of {spec.bias_dtype}"
    if not spec.contiguous:
        return "gemm_a16w16 ignores strides, and the weight isn't contiguous"
    if spec.k % 8:
        return f"K must be a multiple of 8, got {spec.k}"
    return why_not(_gemm())


def shuffled_refuses(spec: LinearSpec, device: Device) -> str | None:
    """The reason why no aiter kernel can serve a GEMM with a shuffled weight, or None."""
    reason = refuses(spec, device)
    if reason is not None:
        return reason
    if not detect.release().at_least(SHUFFLED_SINCE):
        return f"{detect.release().name} does not check whether a weight is shuffled; use {SHUFFLED_SINCE} or later"
    if device.arch == "gfx942":
        # hipBLASLt reads shuffled weights of any shape.
        return None
    if device.arch != "gfx950":
        return f"{device.arch} has no kernel for shuffled weights"
    if spec.dtype != torch.bfloat16 or spec.n % 64 or spec.k % 64:
        got = f"{spec.dtype}, {spec.n} × {spec.k}"
        return f"on gfx950, shuffled weights must be bf16 with N and K multiples of 64, got {got}"
    return None


def shuffled_linear(x: Tensor, data: Tensor, bias: Tensor | None) -> Tensor:
    """See `hf_rocm.ops.shuffled_linear`."""
    result: Tensor = _traced_shuffled(x, data, bias)
    return result


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `hf_rocm.ops.linear`."""
    result: Tensor = _traced(x, weight, bias)
    return result


def _gemm() -> contract.Call | str:
    return contract.operator("gemm_a16w16", frozenset(("A", "B", "bias", "otype")))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # PyTorch raises the error if the devices differ.
    if x.numel() == 0 or x.device != weight.device:
        return F.linear(x, weight, bias)
    kernel: Any = _gemm()
    if bias is None or detect.release().at_least(BIAS_SINCE):
        output: Tensor = kernel(A=rows(x), B=weight, bias=bias, otype=x.dtype)
    else:
        output = kernel(A=rows(x), B=weight, bias=None, otype=x.dtype).add_(bias)
    return output.view(*x.shape[:-1], weight.shape[0])


def _shuffled_linear(x: Tensor, data: Tensor, bias: Tensor | None) -> Tensor:
    if x.numel() == 0 or data.numel() == 0:
        return _shape(x, data, bias)
    marked = data.view(data.shape)
    marked.is_shuffled = True  # type: ignore[attr-defined]
    kernel: Any = _gemm()
    output: Tensor = kernel(A=rows(x), B=marked, bias=None, otype=x.dtype)
    if bias is not None:
        output.add_(bias)
    return output.view(*x.shape[:-1], data.shape[0])


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_traced = opaque("aiter_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _linear, _shape)
_traced_shuffled = opaque(
    "aiter_shuffled_linear(Tensor x, Tensor data, Tensor? bias) -> Tensor", _shuffled_linear, _shape
)
