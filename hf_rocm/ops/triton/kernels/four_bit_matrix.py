"""GEMMs with several rows and 4-bit weights in groups, with matrix instructions; see `four_bit` for the encoding."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import ARCHITECTURES, GFX11
from hf_rocm.ops.triton.kernels.codes import NVIDIA, coded, load_table, result_at, run_of
from hf_rocm.ops.triton.kernels.four_bit import build, decoded_scale, factors_at, inserted, integers, stored_at
from hf_rocm.ops.triton.kernels.linear import part_of
from hf_rocm.ops.triton.kernels.pieces import piece
from hf_rocm.ops.triton.kernels.result import write_result

_NVIDIA = tl.constexpr(NVIDIA)


@triton.jit
def four_bit_rows(
    x,  # [M, K]
    # This and the following arguments are as in `four_bit_vector`, but residual and out are [M, N].
    weight,
    scale,
    zeros,
    # As in `four_bit_vector`, but in the dtype of x.
    table,
    nested_code,
    nested_factors,
    bias,
    residual,
    # If PARTS is more than 1, [PARTS, M, N] in fp32.
    out,
    m_size,
    n_size,
    k_words,
    pattern,  # not used
    ACTIVATION: tl.constexpr,
    SIGNED: tl.constexpr,
    SELECT: tl.constexpr,
    # K is a multiple of SPLITS · 8 · RUN.
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    RUN: tl.constexpr,
    # Whether the number that represents 0 is subtracted before `tl.dot`.
    SUBTRACTS: tl.constexpr,
    # Whether the loop over the groups of a block, or over its halves, is unrolled.
    UNROLLED: tl.constexpr,
    PARTS: tl.constexpr,  # as in `few_rows`
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The GEMM of `four_bit_vector` with matrix instructions: BLOCK_N rows of W times BLOCK_M rows of x, transposed.

    K is split over PARTS programs, and in each program over its warps, which process SPLITS blocks of 8 runs at a time.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.minimum(n, n_size - 1)[:, None].to(tl.int64)
    columns = m[None, :].to(tl.int64) * (8 * k_words)
    valid = (m < m_size)[None, :]
    across, down = tl.arange(0, RUN)[None, :], tl.arange(0, RUN)[:, None]
    block = tl.zeros([1, 1], tl.int32)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if SPLITS > 1:
        rows, columns, valid, across, down = rows[None], columns[None], valid[None], across[None], down[None]
        block = tl.arange(0, SPLITS)[:, None, None]
        sums = tl.zeros([SPLITS, BLOCK_N, BLOCK_M], tl.float32)
    x += columns + block * (8 * RUN) + down
    words = weight + rows * k_words + block * RUN + across
    # Scales per row.
    count = k_words // (GROUP // 8) if STEP else 1
    scales = rows * count
    up_offset = n_size.to(tl.int64) * k_words
    ups = sums
    low, low_end = load_table(table, 0)
    high, high_end = load_table(table, 1)
    begin, end = part_of(8 * k_words, SPLITS * 8 * RUN, PARTS)
    for k in tl.range(begin, end, SPLITS * 8 * RUN):
        start = k + block * (8 * RUN)
        inside = start < 8 * k_words
        filled = valid if EVEN else valid & inside
        first = piece(words + k // 8, inside, EVEN)
        groups = scales + start // GROUP * STEP
        sums = _matrix(
            sums,
            first,
            x + k,
            filled,
            scale,
            zeros,
            table,
            low,
            low_end,
            high,
            high_end,
            nested_code,
            nested_factors,
            groups,
            inside,
            SIGNED,
            SELECT,
            EVEN,
            GROUP,
            STEP,
            RUN,
            SUBTRACTS,
            UNROLLED,
        )
        if ACTIVATION is not None:
            second = piece(words + up_offset + k // 8, inside, EVEN)
            groups += n_size.to(tl.int64) * count
            ups = _matrix(
                ups,
                second,
                x + k,
                filled,
                scale,
                zeros,
                table,
                low,
                low_end,
                high,
                high_end,
                nested_code,
                nested_factors,
                groups,
                inside,
                SIGNED,
                SELECT,
                EVEN,
                GROUP,
                STEP,
                RUN,
                SUBTRACTS,
                UNROLLED,
            )
    if SPLITS > 1:
        sums, ups = tl.sum(sums, 0), tl.sum(ups, 0)
    sums, ups = tl.trans(sums), tl.trans(ups)
    write_result(sums, ups, None, bias, residual, out, m, n, m_size, n_size, ACTIVATION, PARTS)


@triton.jit
def _matrix(
    sums,
    words,
    x,
    filled,
    scale,
    zeros,
    table,
    low,
    low_end,
    high,
    high_end,
    nested_code,
    nested_factors,
    groups,
    inside,
    SIGNED: tl.constexpr,
    SELECT: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    RUN: tl.constexpr,
    SUBTRACTS: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """Add the GEMMs of words [SPLITS, N, RUN] and x [SPLITS, RUN, M] to sums; if SPLITS is 1, that dim is absent."""
    RUNS: tl.constexpr = GROUP // RUN if GROUP < 8 * RUN else 8
    COUNT: tl.constexpr = 8 // RUNS if STEP and UNROLLED else 1
    first_factor, second_factor = factors_at(nested_factors, groups, inside, EVEN)
    if table is not None:
        # how many runs of a half share a scale: at most 4 adjacent ones, or every second one of at most 8
        CHAIN: tl.constexpr = (RUNS if RUNS < 4 else 4) if SELECT == _NVIDIA else (RUNS + 1) // 2
        if UNROLLED:
            for half in tl.static_range(2):
                sums = _half(
                    sums,
                    words,
                    x,
                    filled,
                    scale,
                    low,
                    low_end,
                    high,
                    high_end,
                    nested_code,
                    first_factor,
                    second_factor,
                    groups,
                    inside,
                    half,
                    SIGNED,
                    SELECT,
                    EVEN,
                    STEP,
                    RUN,
                    RUNS,
                    CHAIN,
                    COUNT,
                )
        else:
            for half in tl.range(2, num_stages=1):
                sums = _half(
                    sums,
                    words,
                    x,
                    filled,
                    scale,
                    low,
                    low_end,
                    high,
                    high_end,
                    nested_code,
                    first_factor,
                    second_factor,
                    groups,
                    inside,
                    half,
                    SIGNED,
                    SELECT,
                    EVEN,
                    STEP,
                    RUN,
                    RUNS,
                    CHAIN,
                    COUNT,
                )
    elif UNROLLED:
        for group in tl.static_range(8 // RUNS):
            sums = _group(
                sums,
                words,
                x,
                filled,
                scale,
                zeros,
                nested_code,
                first_factor,
                second_factor,
                groups,
                inside,
                group,
                SELECT,
                EVEN,
                STEP,
                RUN,
                RUNS,
                COUNT,
                SUBTRACTS,
            )
    else:
        for group in tl.range(8 // RUNS, num_stages=1):
            sums = _group(
                sums,
                words,
                x,
                filled,
                scale,
                zeros,
                nested_code,
                first_factor,
                second_factor,
                groups,
                inside,
                group,
                SELECT,
                EVEN,
                STEP,
                RUN,
                RUNS,
                COUNT,
                SUBTRACTS,
            )
    return sums


@triton.jit
def _half(
    sums,
    words,
    x,
    filled,
    scale,
    low,
    low_end,
    high,
    high_end,
    nested_code,
    first_factor,
    second_factor,
    groups,
    inside,
    half,
    SIGNED: tl.constexpr,
    SELECT: tl.constexpr,
    EVEN: tl.constexpr,
    STEP: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    CHAIN: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Add the GEMMs of the runs that are looked up together."""
    dtype: tl.constexpr = x.dtype.element_ty
    a, b, c, d = coded(words, half, low, low_end, high, high_end, SIGNED, SELECT)
    for first in tl.static_range(0, 4, CHAIN):
        part = tl.zeros_like(sums)
        for place in tl.static_range(first, first + CHAIN):
            values = tl.load(x + run_of(half, place, SELECT) * RUN, mask=filled, other=0.0)
            part = tl.dot(result_at(a, b, c, d, place).to(dtype, bitcast=True), values, part)
        group = run_of(half, first, SELECT) // RUNS
        stored = stored_at(scale, groups, group * STEP, inside, COUNT, EVEN)
        sums += part * decoded_scale(stored, nested_code, first_factor, second_factor)
    return sums


@triton.jit
def _group(
    sums,
    words,
    x,
    filled,
    scale,
    zeros,
    nested_code,
    first_factor,
    second_factor,
    groups,
    inside,
    group,
    SELECT: tl.constexpr,
    EVEN: tl.constexpr,
    STEP: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    COUNT: tl.constexpr,
    SUBTRACTS: tl.constexpr,
):
    """Add the GEMMs of the runs that share one scale."""
    dtype: tl.constexpr = x.dtype.element_ty
    part = tl.zeros_like(sums)
    zero = 136.0 if dtype == tl.bfloat16 else 1032.0
    if zeros is not None:
        zero = inserted(stored_at(zeros, groups, group * STEP, inside, COUNT, EVEN).to(tl.int32), dtype)
    if SUBTRACTS:
        stored = stored_at(scale, groups, group * STEP, inside, COUNT, EVEN)
        for run in tl.static_range(RUNS):
            values = tl.load(x + (group * RUNS + run) * RUN, mask=filled, other=0.0)
            numbers = integers(words, group * RUNS + run, dtype, SELECT) - zero
            part = tl.dot(numbers.to(dtype), values, part)
    else:
        # `tl.dot` with ones adds up x in every row, so that threads need not exchange values
        ones = tl.full(words.shape, 1.0, tl.float32).to(dtype)
        total = tl.zeros_like(sums)
        for run in tl.static_range(RUNS):
            values = tl.load(x + (group * RUNS + run) * RUN, mask=filled, other=0.0)
            part = tl.dot(integers(words, group * RUNS + run, dtype, SELECT), values, part)
            total = tl.dot(ones, values, total)
        part -= zero * total
        # loaded after `tl.dot`, so that fewer registers are live
        stored = stored_at(scale, groups, group * STEP, inside, COUNT, EVEN)
    return sums + part * decoded_scale(stored, nested_code, first_factor, second_factor)


BUILDS = (
    build(four_bit_rows, 8, 6144),
    build(four_bit_rows, 8, 4096, residual=True),
    build(four_bit_rows, 8, 14336, activation="silu"),
    build(four_bit_rows, 8, 4096, group=32),
    build(four_bit_rows, 64, 4096, group=32),
    build(four_bit_rows, 8, 6144, zeros=True),
    build(four_bit_rows, 8, 6144, group=4096),
    build(four_bit_rows, 64, 6144),
    build(four_bit_rows, 8, 6144, group=64, code="nf4", nested=True),
    build(four_bit_rows, 8, 14336, activation="silu", group=64, code="nf4"),
    build(four_bit_rows, 64, 6144, group=64, code="nf4"),
    *(
        build(four_bit_rows, 64, 14336, activation="silu", group=64, code="nf4", nested=True, architectures=targets)
        for targets in (GFX11, tuple(gfx for gfx in ARCHITECTURES if gfx not in GFX11))
    ),
    build(four_bit_rows, 8, 14336, activation="silu", group=32, code="e2m1", powers=True),
)
