"""Routed experts for few (token, expert) pairs: each program computes the addresses of its weights from the ids.

So nothing is sorted, copied or read back, and the chosen weights are read once for each pair, which takes nearly all
of the time. Sums are in fp32, rounded where separate layers round. T: tokens; k: experts per token; H, I: MLP sizes.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build
from hf_rocm.ops.triton.kernels.activation import gated, rounded
from hf_rocm.ops.triton.kernels.pairs import WORD, high, low, sum_of_four
from hf_rocm.ops.triton.kernels.pieces import piece
from hf_rocm.ops.triton.tiles import ExpertsTile, down_tile, gate_up_tile


@triton.jit
def chosen_gate_up(
    x,  # [T, H]
    weight,  # [E, 2I, H], transposed [E, H, 2I]
    bias,  # [E, 2I] or None
    ids,  # [T, k]
    scales,  # [T, k]
    out,  # [T · k, I]
    h_size,
    i_size,
    limit,
    alpha,
    TOP_K: tl.constexpr,  # k
    ACTIVATION: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WEIGH_INPUT: tl.constexpr,
    # Whether numbers are read in pairs (see `pairs`); then h_size is H / 2, and the weight is not transposed.
    PAIRS: tl.constexpr,
    # Whether I and H are multiples of the blocks.
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute BLOCK_N columns of one pair. The weight's gate and up rows are read together and separated afterwards."""
    pair = tl.program_id(0)
    first = tl.program_id(1) * BLOCK_N
    dtype: tl.constexpr = out.dtype.element_ty
    expert = tl.load(ids + pair).to(tl.int64)
    both = tl.arange(0, 2 * BLOCK_N)
    if INTERLEAVED:
        n = 2 * first + both
        valid = n < 2 * i_size
    else:
        n = first + both % BLOCK_N
        valid = n < i_size
        n += both // BLOCK_N * i_size
    STEP: tl.constexpr = BLOCK_K // 2 if PAIRS else BLOCK_K
    if PAIRS:
        x, weight = x.to(WORD, bitcast=True), weight.to(WORD, bitcast=True)
    k = tl.arange(0, STEP)[None, :]
    x += (pair // TOP_K).to(tl.int64) * h_size + k
    weight += expert * (2 * i_size * h_size)
    scale = tl.load(scales + pair).to(tl.float32)
    if TRANSPOSED:
        weight += k * (2 * i_size) + n[:, None]
        stride = 2 * i_size
    else:
        weight += n[:, None] * h_size + k
        stride = 1
    sums = tl.zeros([2 * BLOCK_N, STEP // 4 if PAIRS else STEP], tl.float32)
    sums = _accumulate(sums, x, weight, k, valid[:, None], h_size, stride, scale, dtype, WEIGH_INPUT, PAIRS, EVEN, STEP)
    product = tl.sum(sums, 1)
    if bias is not None:
        product += tl.load(bias + expert * (2 * i_size) + n, mask=valid, other=0.0).to(tl.float32)
    product = rounded(product, dtype)
    if INTERLEAVED:
        gate, up = tl.split(tl.reshape(product, (BLOCK_N, 2)))
    else:
        gate, up = tl.split(tl.trans(tl.reshape(product, (2, BLOCK_N))))
    column = first + tl.arange(0, BLOCK_N)
    result = gated(gate, up, limit, alpha, ACTIVATION, dtype)
    tl.store(out + pair.to(tl.int64) * i_size + column, result, mask=column < i_size)


@triton.jit
def chosen_down(
    x,  # [T · k, I]
    weight,  # [E, H, I], transposed [E, I, H]
    bias,  # [E, H] or None
    ids,  # [T, k]
    scales,  # [T, k]
    residual,  # [T, H] or None
    out,  # [T, H]
    h_size,
    i_size,
    TOP_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    WEIGH_INPUT: tl.constexpr,
    # As in `chosen_gate_up`; then i_size is I / 2.
    PAIRS: tl.constexpr,
    # Whether H and I are multiples of the blocks.
    EVEN: tl.constexpr,
    # A divisor of TOP_K.
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute BLOCK_N columns of one token, summed over its experts, plus the residual.

    BLOCK_E experts are read at a time.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    dtype: tl.constexpr = out.dtype.element_ty
    n = column[None, :, None]
    STEP: tl.constexpr = BLOCK_K // 2 if PAIRS else BLOCK_K
    if PAIRS:
        x, weight = x.to(WORD, bitcast=True), weight.to(WORD, bitcast=True)
    k = tl.arange(0, STEP)[None, None, :]
    if TRANSPOSED:
        weight += k * h_size + n
        stride = h_size
    else:
        weight += n * i_size + k
        stride = 1
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, TOP_K, BLOCK_E):
        pairs = token * TOP_K + start + tl.arange(0, BLOCK_E)
        experts = tl.load(ids + pairs).to(tl.int64)
        rows = x + pairs[:, None, None] * i_size + k
        selected = weight + experts[:, None, None] * (h_size * i_size)
        sums = tl.zeros([BLOCK_E, BLOCK_N, STEP // 4 if PAIRS else STEP], tl.float32)
        sums = _accumulate(sums, rows, selected, k, n < h_size, i_size, stride, 1.0, dtype, False, PAIRS, EVEN, STEP)
        product = tl.sum(sums, 2)
        if bias is not None:
            at = bias + experts[:, None] * h_size + column[None, :]
            product += tl.load(at, mask=(column < h_size)[None, :], other=0.0).to(tl.float32)
        product = rounded(product, dtype)
        if not WEIGH_INPUT:
            product *= tl.load(scales + pairs).to(tl.float32)[:, None]
        total += tl.sum(product, 0)
    at = token * h_size + column
    if residual is not None:
        total = rounded(total, dtype) + tl.load(residual + at, mask=column < h_size, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(dtype), mask=column < h_size)


@triton.jit
def _accumulate(
    sums,  # [..., N, STEP], with PAIRS [..., N, STEP / 4]
    # Addresses [..., 1, STEP] of numbers or words.
    x,
    # Addresses [..., N, STEP].
    weight,
    k,
    valid,
    k_size,
    # The stride of the weight along K.
    stride,
    scale,
    dtype: tl.constexpr,
    SCALED: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    STEP: tl.constexpr,
):
    """Add the elementwise products of x and weight to sums, one block of K at a time, in fp32.

    SCALED: whether x is first multiplied by scale and rounded to its dtype.
    """
    for start in tl.range(0, k_size, STEP):
        inside = k < k_size - start
        part = piece(weight + start * stride, inside & valid, EVEN)
        values = piece(x + start, inside, EVEN)
        if PAIRS:
            first = _factors(low(values, dtype), scale, dtype, SCALED)
            second = _factors(high(values, dtype), scale, dtype, SCALED)
            sums += sum_of_four(low(part, dtype) * first + high(part, dtype) * second)
        else:
            sums += part.to(tl.float32) * _factors(values.to(tl.float32), scale, dtype, SCALED)
    return sums


@triton.jit
def _factors(values, scale, dtype: tl.constexpr, SCALED: tl.constexpr):
    if SCALED:
        return rounded(values * scale, dtype)
    return values


_TENSORS = {
    chosen_gate_up: ("x", "weight", "bias", "scales", "out"),
    chosen_down: ("x", "weight", "bias", "scales", "residual", "out"),
}


def _build(kernel: Any, tile: ExpertsTile, signature: dict[str, str], constants: dict[str, Any]) -> Build:
    """Build for bf16, with sizes that are multiples of the blocks."""
    tensors = {name: "*bf16" for name in _TENSORS[kernel] if name not in constants}
    return Build(
        kernel,
        {**tensors, "ids": "*i64", "h_size": "i32", "i_size": "i32", **signature},
        {**constants, "WEIGH_INPUT": False, "PAIRS": not constants["TRANSPOSED"], "EVEN": True, **tile.constants()},
        threads=tile.threads,
        num_stages=tile.stages,
        divisible=("h_size", "i_size"),
    )


_TERMS = {"limit": "fp32", "alpha": "fp32"}
_QWEN: dict[str, Any] = {"TOP_K": 8, "TRANSPOSED": False, "bias": None}
_GPT_OSS: dict[str, Any] = {"TOP_K": 4, "TRANSPOSED": True}
_WITHOUT: dict[str, Any] = {"residual": None}

BUILDS = (
    _build(chosen_gate_up, gate_up_tile(False), _TERMS, {**_QWEN, "ACTIVATION": "silu", "INTERLEAVED": False}),
    _build(chosen_down, down_tile(1, 8, False, rocm=True), {}, _QWEN),
    _build(chosen_down, down_tile(1, 8, False, rocm=True), {}, _QWEN | _WITHOUT),
    _build(
        chosen_gate_up, gate_up_tile(True), _TERMS, {**_GPT_OSS, "ACTIVATION": "clamped_swiglu", "INTERLEAVED": True}
    ),
    _build(chosen_down, down_tile(1, 4, True, rocm=True), {}, _GPT_OSS),
    _build(chosen_down, down_tile(8, 4, True, rocm=True), {}, _GPT_OSS | _WITHOUT),
)
