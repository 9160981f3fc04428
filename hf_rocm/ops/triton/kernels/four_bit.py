"""Products of few rows with 4-bit weights in groups: the kernels of `linear`, for another encoding of W.

A word has one number of each of eight runs of K, see `ops.four_bit`. The numbers of a run are converted with a shift
and a logical operation, as the mantissa of a float, and multiplied by a contiguous piece of x. The sum of a group is
multiplied by its scale, once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.four_bit import kernel_groups, run_length
from hf_rocm.ops.triton.builds import ARCHITECTURES, Build
from hf_rocm.ops.triton.kernels.linear import finished, gate, piece, store
from hf_rocm.ops.triton.tiles import four_bit_tile


@triton.jit
def four_bit_vector(
    x,  # [1, K]
    weight,  # [N, K / 8] int32, with a gate [2N, K / 8]
    scale,  # [N, K / GROUP], with a gate [2N, K / GROUP]
    zeros,  # of the same shape, uint8: the stored numbers that stand for 0; None: 8
    bias,  # one for each row of weight, or None
    residual,  # [1, N] or None
    out,  # [1, N]
    m_size,
    n_size,
    k_words,  # K / 8: its divisibility is that of the addresses
    one,  # the bits of 1.0: as a constant, NVIDIA's assembler would use two instructions instead of one
    ACTIVATION: tl.constexpr,  # of the gate, or None
    EVEN: tl.constexpr,  # K is a multiple of BLOCKS · 8 · RUN
    GROUP: tl.constexpr,  # numbers with one scale
    STEP: tl.constexpr,  # 1; 0: a row has one scale
    RUN: tl.constexpr,  # the length of a run
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,  # of 8 runs
):
    """BLOCK_N columns of the result for one row, by multiplying and adding up."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # blocks first: the compiler then spreads words and x over the threads in the same way, a row in every thread
    rows = tl.minimum(n, n_size - 1)[None, :, None].to(tl.int64)
    block = tl.arange(0, BLOCKS)[:, None, None]
    within = tl.arange(0, RUN)[None, None, :]
    x += block * (8 * RUN) + within
    words = weight + rows * k_words + block * RUN + within
    count = k_words // (GROUP // 8) if STEP else 1  # of a row's scales
    scales = rows * count
    gap = n_size.to(tl.int64) * k_words
    sums = tl.zeros([BLOCKS, BLOCK_N, RUN], tl.float32)
    if ACTIVATION is not None:
        ups = tl.zeros([BLOCKS, BLOCK_N, RUN], tl.float32)
    for k in tl.range(0, 8 * k_words, BLOCKS * 8 * RUN):
        start = k + block * (8 * RUN)
        inside = start < 8 * k_words
        first = piece(words + k // 8, inside, EVEN)
        groups = scales + start // GROUP * STEP
        sums = _vector(sums, first, x + k, scale, zeros, groups, one, inside, EVEN, GROUP, STEP, RUN)
        if ACTIVATION is not None:
            second = piece(words + gap + k // 8, inside, EVEN)
            groups += n_size.to(tl.int64) * count
            ups = _vector(ups, second, x + k, scale, zeros, groups, one, inside, EVEN, GROUP, STEP, RUN)
    product = finished(tl.sum(tl.sum(sums, 2), 0)[None, :], None, bias, n, n_size, out.dtype.element_ty)
    if ACTIVATION is not None:
        up = finished(tl.sum(tl.sum(ups, 2), 0)[None, :], None, bias, n + n_size, 2 * n_size, out.dtype.element_ty)
        product = gate(product, up, ACTIVATION)
    store(product, residual, out, tl.arange(0, 1), n, m_size, n_size)


@triton.jit
def _vector(
    sums,
    words,
    x,
    scale,
    zeros,
    groups,
    one,
    inside,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    RUN: tl.constexpr,
):
    """Add the products of words [BLOCKS, N, RUN] to sums of the same shape."""
    RUNS: tl.constexpr = GROUP // RUN if GROUP < 8 * RUN else 8  # with one scale
    for group in tl.static_range(8 // RUNS):
        # 1 + q / 16 stands for (q - zero) / 16: the difference is subtracted once for a group
        one_and_zero = 1.5
        if zeros is not None:
            one_and_zero = 1.0 + piece(zeros + groups + group * STEP, inside, EVEN).to(tl.float32) * 0.0625
        part = 0.0
        for run in tl.static_range(RUNS):
            part -= one_and_zero * piece(x + (group * RUNS + run) * RUN, inside, EVEN).to(tl.float32)
        for run in tl.static_range(RUNS):
            values = piece(x + (group * RUNS + run) * RUN, inside, EVEN).to(tl.float32)
            part += values * _mantissa(words, one, group * RUNS + run)
        sums += part * (16.0 * piece(scale + groups + group * STEP, inside, EVEN).to(tl.float32))
    return sums


@triton.jit
def _mantissa(words, one, RUN_INDEX: tl.constexpr):
    """1 + q / 16 for the 4-bit numbers q of a run."""
    if RUN_INDEX < 5:
        bits = words << (19 - 4 * RUN_INDEX)
    else:
        bits = words >> (4 * RUN_INDEX - 19)
    return ((bits & 0x00780000) | one).to(tl.float32, bitcast=True)


@triton.jit
def four_bit_rows(
    x,  # [M, K]
    weight,  # the rest as above
    scale,
    zeros,
    bias,
    residual,
    out,
    m_size,
    n_size,
    k_words,
    one,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,  # K is a multiple of SPLITS · 8 · RUN
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    RUN: tl.constexpr,
    UNROLLED: tl.constexpr,  # whether the groups of a block are unrolled
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The same with matrix instructions: BLOCK_N rows of W times BLOCK_M rows of x, transposed.

    Warps without separate columns process SPLITS blocks of 8 runs at a time.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.minimum(n, n_size - 1)[:, None].to(tl.int64)
    columns = m[None, :].to(tl.int64) * (8 * k_words)
    there = (m < m_size)[None, :]
    across, down = tl.arange(0, RUN)[None, :], tl.arange(0, RUN)[:, None]
    block = tl.zeros([1, 1], tl.int32)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if SPLITS > 1:
        rows, columns, there, across, down = rows[None], columns[None], there[None], across[None], down[None]
        block = tl.arange(0, SPLITS)[:, None, None]
        sums = tl.zeros([SPLITS, BLOCK_N, BLOCK_M], tl.float32)
    x += columns + block * (8 * RUN) + down
    words = weight + rows * k_words + block * RUN + across
    count = k_words // (GROUP // 8) if STEP else 1  # of a row's scales
    scales = rows * count
    gap = n_size.to(tl.int64) * k_words
    ups = sums
    for k in tl.range(0, 8 * k_words, SPLITS * 8 * RUN):
        start = k + block * (8 * RUN)
        inside = start < 8 * k_words
        filled = there if EVEN else there & inside
        first = piece(words + k // 8, inside, EVEN)
        groups = scales + start // GROUP * STEP
        sums = _matrix(sums, first, x + k, filled, scale, zeros, groups, inside, EVEN, GROUP, STEP, RUN, UNROLLED)
        if ACTIVATION is not None:
            second = piece(words + gap + k // 8, inside, EVEN)
            groups += n_size.to(tl.int64) * count
            ups = _matrix(ups, second, x + k, filled, scale, zeros, groups, inside, EVEN, GROUP, STEP, RUN, UNROLLED)
    if SPLITS > 1:
        sums, ups = tl.sum(sums, 0), tl.sum(ups, 0)
    product = finished(tl.trans(sums), None, bias, n, n_size, out.dtype.element_ty)
    if ACTIVATION is not None:
        up = finished(tl.trans(ups), None, bias, n + n_size, 2 * n_size, out.dtype.element_ty)
        product = gate(product, up, ACTIVATION)
    store(product, residual, out, m, n, m_size, n_size)


@triton.jit
def _matrix(
    sums,
    words,
    x,
    filled,
    scale,
    zeros,
    groups,
    inside,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    RUN: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """Add the products of words [SPLITS, N, RUN] and x [SPLITS, RUN, M] to sums; without SPLITS if it is 1."""
    RUNS: tl.constexpr = GROUP // RUN if GROUP < 8 * RUN else 8
    if UNROLLED:
        for group in tl.static_range(8 // RUNS):
            sums = _group(sums, words, x, filled, scale, zeros, groups + group * STEP, inside, group, EVEN, RUN, RUNS)
    else:
        for group in tl.range(8 // RUNS, num_stages=1):
            sums = _group(sums, words, x, filled, scale, zeros, groups + group * STEP, inside, group, EVEN, RUN, RUNS)
    return sums


@triton.jit
def _group(
    sums,
    words,
    x,
    filled,
    scale,
    zeros,
    place,
    inside,
    group,
    EVEN: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
):
    """The same for the runs with one scale."""
    DOWN: tl.constexpr = len(sums.shape) - 2
    dtype: tl.constexpr = x.dtype.element_ty
    base: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
    zero = base + 8.0
    if zeros is not None:
        zero = base + piece(zeros + place, inside, EVEN).to(tl.float32)
    part = tl.zeros_like(sums)
    total = 0.0
    for run in tl.static_range(RUNS):
        values = tl.load(x + (group * RUNS + run) * RUN, mask=filled, other=0.0)
        part = tl.dot(_integers(words, group * RUNS + run, dtype), values, part)
        total += tl.sum(values.to(tl.float32), DOWN, keep_dims=True)
    return sums + (part - zero * total) * piece(scale + place, inside, EVEN).to(tl.float32)


@triton.jit
def _integers(words, run, DTYPE: tl.constexpr):
    """128 + q in bf16 or 1024 + q in fp16, for the 4-bit numbers q of a run."""
    bits = (words >> (4 * run)) & 0xF
    if tl.bfloat16 == DTYPE:
        return (bits | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        tl.static_assert(tl.float16 == DTYPE)
        return (bits | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)


def _build(
    rows: int,
    n: int,
    k: int = 4096,
    *,
    activation: str | None = None,
    residual: bool = False,
    group: int = 128,
    zeros: bool = False,
) -> Build:
    tensors = {"x": "bf16", "weight": "i32", "scale": "bf16", "zeros": "u8" * zeros, "out": "bf16"}
    tensors |= {"bias": "", "residual": "bf16" * residual}
    run = run_length(k, group)
    cut = four_bit_tile(rows, n, activation is not None, run, rocm=True)
    group, step = kernel_groups(k, group)
    return Build(
        four_bit_rows if cut.matrix else four_bit_vector,
        {
            **{name: f"*{dtype}" for name, dtype in tensors.items() if dtype},
            **dict.fromkeys(("m_size", "n_size", "k_words", "one"), "i32"),
        },
        {
            **{name: None for name, dtype in tensors.items() if not dtype},
            "ACTIVATION": activation,
            "EVEN": True,
            "GROUP": group,
            "STEP": step,
            "RUN": run,
            **cut.constants(),
        },
        threads=cut.threads,
        num_stages=cut.stages,
        divisible=("n_size", "k_words", "one"),
        matrix=cut.matrix,
        architectures=tuple(ARCHITECTURES),
    )


BUILDS = (
    _build(1, 6144),
    _build(1, 4096, residual=True),
    _build(1, 14336, activation="silu"),
    _build(8, 6144),
    _build(8, 4096, residual=True),
    _build(8, 14336, activation="silu"),
    _build(8, 4096, group=32),
    _build(1, 6144, zeros=True),
    _build(8, 6144, zeros=True),
    _build(8, 6144, group=4096),
    _build(64, 6144),
)
