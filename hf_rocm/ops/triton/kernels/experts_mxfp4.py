"""Routed experts in MXFP4 for few token-expert pairs: the kernels of `experts`, for another encoding.

A word contains 8 consecutive numbers along K. x is stored in the order [8, K / 8], so that the first numbers of
several words are multiplied by a contiguous piece of x, then the second ones, and so on. Blocks are the first dim of
tiles, so that the compiler distributes words and x across the threads in the same way. A number becomes the last
exponent bits and the first bit of the mantissa of a float, which is exactly 2⁻¹²⁶ times the number. x is first
multiplied by 2⁶⁴, and the sum of a word by 2⁶² and by the scale of its block, so that no intermediate result leaves the
range of fp32 where |x| < 2⁶³.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build
from hf_rocm.ops.triton.kernels.activation import gated, rounded
from hf_rocm.ops.triton.kernels.four_bit import power, tiny_number
from hf_rocm.ops.triton.tiles import Mxfp4Tile, mxfp4_down_tile, mxfp4_gate_up_tile

# The factor by which x is multiplied first.
_LIFT = tl.constexpr(2.0**64)
_REST = tl.constexpr(2.0**62)


@triton.jit
def mxfp4_gate_up(
    x,  # [T, 8, H / 8]
    words,  # [E, 2I, H / 32, 4] int32, gate and up alternating
    scale,  # [E, 2I, H / 32] uint8
    bias,  # [E, 2I], or None
    ids,  # [T, k]
    out,  # [T · k, 8, I / 8]
    h_blocks,  # H / 32
    i_blocks,  # I / 32
    limit,
    alpha,
    TOP_K: tl.constexpr,  # k
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Compute BLOCK_N columns of one pair."""
    pair = tl.program_id(0)
    first = tl.program_id(1) * BLOCK_N
    dtype: tl.constexpr = out.dtype.element_ty
    expert = tl.load(ids + pair).to(tl.int64)
    i_size = i_blocks * 32
    n = 2 * first + tl.arange(0, 2 * BLOCK_N)
    rows = (expert * (2 * i_size) + tl.minimum(n, 2 * i_size - 1))[None, :, None] * h_blocks
    x += (pair // TOP_K).to(tl.int64) * (h_blocks * 32)
    sums = tl.zeros([BLOCKS, 2 * BLOCK_N, 4], tl.float32)
    block, within = tl.arange(0, BLOCKS)[:, None, None], tl.arange(0, 4)[None, None, :]
    sums = _accumulate(sums, x, words, scale, rows, block, within, h_blocks, BLOCKS)
    product = tl.sum(tl.sum(sums, 2), 0)
    if bias is not None:
        product += tl.load(bias + expert * (2 * i_size) + n, mask=n < 2 * i_size, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(rounded(product, dtype), (BLOCK_N, 2)))
    result = gated(gate, up, limit, alpha, ACTIVATION, dtype)
    column = first + tl.arange(0, BLOCK_N)
    at = column % 8 * (i_blocks * 4) + column // 8
    tl.store(out + pair.to(tl.int64) * i_size + at, result, mask=column < i_size)


@triton.jit
def mxfp4_down(
    x,  # [T · k, 8, I / 8]
    words,  # [E, H, I / 32, 4] int32
    scale,  # [E, H, I / 32] uint8
    bias,  # [E, H], or None
    ids,  # [T, k]
    weights,  # [T, k]
    out,  # [T, H]
    h_size,
    i_blocks,  # I / 32
    TOP_K: tl.constexpr,  # k
    BLOCK_E: tl.constexpr,  # divides TOP_K
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Compute BLOCK_N columns of one token, summed over its experts. BLOCK_E experts are read at a time."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    dtype: tl.constexpr = out.dtype.element_ty
    n = tl.minimum(column, h_size - 1)
    block, within = tl.arange(0, BLOCKS)[:, None, None, None], tl.arange(0, 4)[None, None, None, :]
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, TOP_K, BLOCK_E):
        pairs = token * TOP_K + start + tl.arange(0, BLOCK_E)
        experts = tl.load(ids + pairs).to(tl.int64)
        rows = (experts[:, None] * h_size + n[None, :])[None, :, :, None] * i_blocks
        inputs = x + pairs[None, :, None, None] * (i_blocks * 32)
        sums = tl.zeros([BLOCKS, BLOCK_E, BLOCK_N, 4], tl.float32)
        sums = _accumulate(sums, inputs, words, scale, rows, block, within, i_blocks, BLOCKS)
        product = tl.sum(tl.sum(sums, 3), 0)
        if bias is not None:
            product += tl.load(bias + experts[:, None] * h_size + n[None, :]).to(tl.float32)
        weight = tl.broadcast_to(tl.load(weights + pairs).to(tl.float32)[:, None], product.shape)
        # `fma` rounds each weighted output before the sum. Otherwise, the compiler would fuse the multiplication and
        # the addition, and lanes that add the same experts in a different order would differ in the last bit.
        total += tl.sum(tl.fma(rounded(product, dtype), weight, tl.zeros_like(product)), 0)
    tl.store(out + token * h_size + column, total.to(dtype), mask=column < h_size)


@triton.jit
def _accumulate(
    sums,  # [BLOCKS, …, N, 4]
    # Addresses of inputs [8, K / 8]: a scalar, or [1, …, 1, 1].
    x,
    words,
    scale,
    rows,  # [1, …, N, 1]: the first block of each row
    block,
    within,
    blocks,  # K / 32
    BLOCKS: tl.constexpr,
):
    """Add the elementwise products of x and the weight to sums in fp32, some blocks of K at a time."""
    for start in tl.range(0, blocks, BLOCKS):
        index = start + block
        inside = index < blocks
        bits = tl.load(words + (rows + index) * 4 + within, mask=inside, other=0)
        part = tl.zeros_like(sums)
        for place in tl.static_range(8):
            values = tl.load(x + place * (blocks * 4) + index * 4 + within, mask=inside, other=0.0)
            part += tiny_number(bits, place) * (values.to(tl.float32) * _LIFT)
        factor = power(tl.load(scale + rows + index, mask=inside, other=0))
        sums += (part * _REST) * factor
    return sums


@triton.jit
def dequantize_mxfp4(
    words,  # [N · K / 8] int32
    scale,  # [N · K / 32] uint8
    out,  # [N · K]
    size,  # N · K
    BLOCK: tl.constexpr,
):
    """Convert BLOCK numbers to another dtype."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    bits = tl.load(words + index // 8, mask=inside, other=0) >> (index % 8 * 4).to(tl.int32)
    factor = power(tl.load(scale + index // 32, mask=inside, other=0))
    # in three steps, none of which leaves the range of fp32 before the result does
    numbers = ((tiny_number(bits, 0) * _LIFT) * _REST) * factor
    tl.store(out + index, numbers.to(out.dtype.element_ty), mask=inside)


def _build(
    kernel: Any, tile: Mxfp4Tile, sizes: tuple[str, ...], constants: dict[str, Any], *, bias: bool = True, **types: str
) -> Build:
    """The build for bf16."""
    return Build(
        kernel,
        {
            **dict.fromkeys(("x", "bias", "out") if bias else ("x", "out"), "*bf16"),
            "words": "*i32",
            "scale": "*u8",
            "ids": "*i64",
            **dict.fromkeys(sizes, "i32"),
            **types,
        },
        {**({} if bias else {"bias": None}), **constants, **tile.constants()},
        threads=tile.threads,
        num_stages=tile.stages,
        divisible=("h_size",),
    )


def _builds(h_blocks: int, i_blocks: int, top_k: int, activation: str, *, bias: bool) -> tuple[Build, Build]:
    """Both kernels for experts of these sizes."""
    first, second = mxfp4_gate_up_tile(h_blocks, rocm=True), mxfp4_down_tile(i_blocks, top_k, rocm=True)
    terms = {"TOP_K": top_k, "ACTIVATION": activation}
    sizes = ("h_blocks", "i_blocks"), ("h_size", "i_blocks")
    return (
        _build(mxfp4_gate_up, first, sizes[0], terms, bias=bias, limit="fp32", alpha="fp32"),
        _build(mxfp4_down, second, sizes[1], {"TOP_K": top_k}, bias=bias, weights="*bf16"),
    )


BUILDS = (
    *_builds(90, 90, 4, "clamped_swiglu", bias=True),  # gpt-oss
    *_builds(64, 24, 8, "silu", bias=False),  # Qwen3-30B-A3B
    Build(
        dequantize_mxfp4,
        {"words": "*i32", "scale": "*u8", "out": "*bf16", "size": "i32"},
        {"BLOCK": 1024},
        threads=128,
        divisible=("size",),
    ),
)
