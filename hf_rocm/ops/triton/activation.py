"""Activations, alone or as the gate of a gated MLP, through hf_rocm's kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.fakes import half, like
from hf_rocm.ops.triton import detect
from hf_rocm.ops.triton.launch import cached, form, forms_of, launch, power_of_two, warps
from hf_rocm.ops.triton.norm import DTYPES

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.specs.pointwise import ActivationSpec, ActSpec


def refuses(spec: ActivationSpec | ActSpec, device: Device) -> str | None:
    """Why the kernel can't serve this activation, or None."""
    if spec.grad:
        return "the activation kernel has no gradient"
    if spec.dtype not in DTYPES:
        return f"the activation kernel supports fp32, bf16 and fp16, not {spec.dtype}"
    return detect.unavailable(device)


def act(x: Tensor, activation: str) -> Tensor:
    """See `hf_rocm.ops.act`. Rounds once, where separate operations round several times."""
    result: Tensor = _traced_act(x, activation)
    return result


def act_and_mul(x: Tensor, activation: str, interleaved: bool, limit: float, alpha: float) -> Tensor:
    """See `hf_rocm.ops.act_and_mul`. Rounds the activation before the multiplication, as the unfused layers do."""
    result: Tensor = _traced(x, activation, interleaved, limit, alpha)
    return result


@cached
def tile(rows: int, dim: int) -> tuple[int, int]:
    """(columns, threads) of a program, both powers of two."""
    block = min(1024, power_of_two(dim))
    return block, max(32, block // 8)


def _forward(x: Tensor, activation: str, interleaved: bool, limit: float, alpha: float) -> Tensor:
    out = half(x)
    if out.numel():
        from hf_rocm.ops.triton.kernels.activation import act_and_mul_kernel

        matrix = x.reshape(-1, x.shape[-1])
        if matrix.stride(1) != 1:
            matrix = matrix.contiguous()
        rows, dim = matrix.shape[0], out.shape[-1]
        block, threads = tile(rows, dim)
        launch(
            act_and_mul_kernel,
            (rows, -(-dim // block)),
            (matrix, out, matrix.stride(0), float(limit), float(alpha)),
            {"DIM": dim, "ACTIVATION": activation, "INTERLEAVED": interleaved, "BLOCK": block},
            num_warps=warps(threads, x.device),
            forms=(forms_of(matrix, out), matrix.stride(0)),
        )
    return out


def _act_forward(x: Tensor, activation: str) -> Tensor:
    out = like(x)
    if out.numel():
        from hf_rocm.ops.triton.kernels.activation import act_kernel

        x, size = x.contiguous(), out.numel()
        block, threads = tile(1, size)
        launch(
            act_kernel,
            (-(-size // block),),
            (x, out, size),
            {"ACTIVATION": activation, "BLOCK": block},
            num_warps=warps(threads, x.device),
            forms=(forms_of(x, out), form(size)),
        )
    return out


_traced_act = opaque("triton_act(Tensor x, str activation) -> Tensor", _act_forward, like)
_traced = opaque(
    "triton_act_and_mul(Tensor x, str activation, bool interleaved, float limit, float alpha) -> Tensor",
    _forward,
    half,
)
