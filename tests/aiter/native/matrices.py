"""Stand-ins for aiter's norms, gated activations, GEMMs and rotary embedding.

Most of aiter's kernels assume dense rows and do not check this; the stand-ins check it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .strict import CALLS, need


def check_rows(*tensors: Tensor) -> None:
    for tensor in tensors:
        need(tensor.dim() == 2 and tensor.is_contiguous(), "the tensor must be a contiguous matrix")
        need(tensor.numel() > 0, "the tensor must not be empty")


def _and_mul(out: Tensor, input: Tensor, activation: Any) -> None:
    check_rows(out, input)
    need(
        out.dtype == input.dtype and out.dtype in (torch.float16, torch.bfloat16),
        "input and output must have the same dtype, fp16 or bf16",
    )
    need(
        input.shape[1] == 2 * out.shape[1] and out.shape[1] % 8 == 0,
        "the input must be [gate | up], and the width of both must be a multiple of 8",
    )
    gate, up = input.float().chunk(2, -1)
    out.copy_(activation(gate) * up)


def silu_and_mul(out: Tensor, input: Tensor) -> None:
    _and_mul(out, input, torch.nn.functional.silu)


def gelu_and_mul(out: Tensor, input: Tensor) -> None:
    _and_mul(out, input, torch.nn.functional.gelu)


def gelu_tanh_and_mul(out: Tensor, input: Tensor) -> None:
    _and_mul(out, input, functools.partial(torch.nn.functional.gelu, approximate="tanh"))


def _normed(input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    check_rows(input)
    need(
        weight.dtype == input.dtype and weight.is_contiguous(),
        "the weight must be contiguous and have the input's dtype",
    )
    need(input.dtype in (torch.float16, torch.bfloat16), "the input must be fp16 or bf16")
    wide = input.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.float()).to(input.dtype)


def rmsnorm2d_fwd(input: Tensor, weight: Tensor, epsilon: float, use_model_sensitive_rmsnorm: int = 0) -> Tensor:
    return _normed(input, weight, epsilon)


def rmsnorm2d_fwd_with_add(
    out: Tensor,
    input: Tensor,
    residual_in: Tensor,
    residual_out: Tensor,
    weight: Tensor,
    epsilon: float,
    use_model_sensitive_rmsnorm: int = 0,
) -> None:
    check_rows(out, input, residual_in, residual_out)
    residual_out.copy_(input + residual_in)
    out.copy_(_normed(residual_out, weight, epsilon))


def rope_cached_2c_fwd_impl(
    output_x: Tensor,
    output_y: Tensor,
    input_x: Tensor,
    input_y: Tensor,
    cos: Tensor,
    sin: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> None:
    need(
        cos.is_contiguous() and sin.is_contiguous() and cos.dtype == sin.dtype == input_x.dtype,
        "angles must be contiguous and have the input's dtype",
    )
    need(not reuse_freqs_front_part and not nope_first, "not supported by this stand-in")
    r = cos.shape[-1]
    need(cos.shape == (input_x.shape[0], 1, 1, r), "angles must have the shape [s, 1, 1, d]")
    for source, target in ((input_x, output_x), (input_y, output_y)):
        need(source.stride(-1) == target.stride(-1) == 1, "the last dim must be dense")
        part = source[..., :r].float()
        if rotate_style == 0:
            rotated = torch.cat((-part[..., r // 2 :], part[..., : r // 2]), -1)
        else:
            rotated = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
        target[..., :r] = part * cos.float() + rotated * sin.float()
        target[..., r:] = source[..., r:]


def get_padded_m(M: int, N: int, K: int, gl: int) -> int:
    """The padded M with which aiter reads its tuned table. The exact values do not matter in these tests."""
    step = 16 if gl == 0 else 64
    return -(-M // step) * step


def wv_splitk_small_fp16_bf16(in_a: Tensor, in_b: Tensor, out_c: Tensor, N_in: int, CuCount: int) -> None:
    check_rows(in_a, in_b, out_c)
    out_c.copy_(in_b @ in_a.t())


def hipb_create_extension() -> None:
    pass


def hipb_mm(
    mat1: Tensor,
    mat2: Tensor,
    solution_index: int,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scaleA: Tensor | None = None,
    scaleB: Tensor | None = None,
    scaleOut: Tensor | None = None,
    bpreshuffle: bool | None = None,
) -> Tensor:
    need(
        any(call.kernel == "hipb_create_extension" for call in CALLS),
        "hipBLASLt is called before its handle is created",
    )
    return torch.nn.functional.linear(mat1, mat2.t(), bias)


def gemm_a16w16_asm(
    A: Tensor, B: Tensor, out: Tensor, bias: Tensor | None, splitK: int | None, kernelName: str | None
) -> Tensor:
    check_rows(A, B, out)
    need(bias is None, "this release's assembly kernel ignores the bias")
    out.copy_(A.float() @ B.float().t())
    return out
