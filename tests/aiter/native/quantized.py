"""Stand-ins for aiter's 8-bit GEMMs. They check shapes and dtypes, which aiter's kernels do not."""

from __future__ import annotations

import torch
from torch import Tensor

from .matrices import check_rows
from .strict import need

FP8 = (torch.float8_e4m3fnuz, torch.float8_e4m3fn)
# The largest tile in N and K for any number of rows; the kernel does not pad N and K.
TILE = 256


def _check(XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, Y: Tensor) -> None:
    check_rows(XQ, WQ, Y)
    need(XQ.dtype == WQ.dtype and XQ.dtype in (torch.int8, *FP8), "both operands must be int8 or both fp8")
    need(x_scale.dtype == w_scale.dtype == torch.float32, "scales must be fp32")
    need(x_scale.shape == (len(XQ), 1) and w_scale.shape == (1, len(WQ)), "there must be one scale per row")
    need(x_scale.is_contiguous() and w_scale.is_contiguous(), "scales must be contiguous")
    need(Y.dtype in (torch.float16, torch.bfloat16), "the output must be fp16 or bf16")


def gemm_a8w8(
    XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, Y: Tensor, bias: Tensor | None = None, splitK: int = 0
) -> Tensor:
    _check(XQ, WQ, x_scale, w_scale, Y)
    need(
        bias is None or (bias.dtype == Y.dtype and bias.is_contiguous()),
        "the bias must be contiguous and have the output's dtype",
    )
    need(XQ.shape[1] % 16 == 0 and len(WQ) % 8 == 0, "K must be a multiple of 16 and N of 8")
    output = XQ.float() @ WQ.float().t() * x_scale * w_scale
    return Y.copy_(output if bias is None else output + bias)


def gemm_a8w8_bpreshuffle(
    XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, Y: Tensor, splitK: int = 0
) -> Tensor:
    _check(XQ, WQ, x_scale, w_scale, Y)
    n, k = WQ.shape
    need(XQ.dtype in FP8, "the operands must be fp8")
    need(n % TILE == 0 and k % TILE == 0 and k >= 512, "N and K must be multiples of the tile size, and K at least 512")
    tiles = WQ.view(torch.uint8).view(n // 16, k // 32, 2, 16, 16)
    plain = tiles.permute(0, 3, 1, 2, 4).reshape(n, k).view(WQ.dtype)
    return Y.copy_(XQ.float() @ plain.float().t() * x_scale * w_scale)
