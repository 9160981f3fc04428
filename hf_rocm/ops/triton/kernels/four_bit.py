"""GEMMs with one row and 4-bit weights in groups: the kernel of `linear`, for another encoding of W.

A word contains one number from each of eight runs along K (see `ops.four_bit`). The numbers of a run are multiplied by
a contiguous piece of x, and the sum over a group is multiplied once by its scale. On AMD GPUs, a mask selects four
numbers of a word, one per byte, and one instruction converts any byte to a float. On other GPUs, a shift and a logical
operation put a number into the mantissa of a float. With a code, the numbers are looked up in registers; see `codes`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hf_rocm.ops.four_bit import SIGNED, kernel_groups, run_length
from hf_rocm.ops.triton.builds import ARCHITECTURES, Build
from hf_rocm.ops.triton.kernels.codes import AMD, NVIDIA, coded_run, load_table
from hf_rocm.ops.triton.kernels.pieces import piece, read_once
from hf_rocm.ops.triton.kernels.result import write_result
from hf_rocm.ops.triton.tiles import four_bit_tile

_NVIDIA = tl.constexpr(NVIDIA)
# The PTX of `integers` for two words: the halves with the run of both words in one register, then two numbers at once.
_PAIR = tl.constexpr(
    "\n".join(
        (
            "{",
            ".reg .b32 halves;",
            "prmt.b32 halves, $1, $2, $3;",
            "shr.u32 halves, halves, $5;",
            "lop3.b32 $0, halves, 0x000F000F, $7, 0xEA;",
            "}",
        )
    )
)


@triton.jit
def four_bit_vector(
    x,  # [1, K]
    weight,  # [N, K / 8] int32, with a gate [2N, K / 8]
    scale,  # [N, K / GROUP], with a gate [2N, K / GROUP]; if STEP is 0, [N, 1] or [2N, 1]
    # Of scale's shape, uint8: the stored numbers that represent 0; None: 8.
    zeros,
    # The bytes of the 16 numbers of a code in fp16, see `load_table`; None: integers.
    table,
    nested_code,  # [256] fp32, the table by which uint8 scales are decoded, or None
    nested_factors,  # [⌈scales / 256⌉, 2] fp32, see `ops.four_bit.Nested`, or None
    # One for each row of weight, or None.
    bias,
    residual,  # [1, N] or None
    out,  # [1, N]
    m_size,
    n_size,
    k_words,  # K / 8
    # The bits of 1.0, or 0x0F0F0F0F with BYTES.
    pattern,
    # The activation of the gate, or None.
    ACTIVATION: tl.constexpr,
    SIGNED: tl.constexpr,  # see `coded`
    SELECT: tl.constexpr,
    # K is a multiple of BLOCKS · 8 · RUN.
    EVEN: tl.constexpr,
    # Numbers that share a scale.
    GROUP: tl.constexpr,
    # 0 if each row has one scale, else 1.
    STEP: tl.constexpr,
    # The length of a run.
    RUN: tl.constexpr,
    # Whether the GPU converts any byte of a register to a float in one instruction, as AMD's do.
    BYTES: tl.constexpr,
    # The number of pieces of a run, which are processed one after another with the same scale.
    PIECES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    # The number of blocks, of 8 runs each, that are loaded at once.
    BLOCKS: tl.constexpr,
):
    """Compute BLOCK_N columns of the result for one row by multiplying and summing.

    The divisibility of k_words determines the alignment of the addresses. As a constant, pattern would take more
    instructions.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # blocks are the first dim, so that the compiler distributes words and x over the threads in the same way
    rows = tl.minimum(n, n_size - 1)[None, :, None].to(tl.int64)
    block = tl.arange(0, BLOCKS)[:, None, None]
    within = tl.arange(0, RUN // PIECES)[None, None, :]
    x += block * (8 * RUN) + within
    words = weight + rows * k_words + block * RUN + within
    # Scales per row.
    count = k_words // (GROUP // 8) if STEP else 1
    scales = rows * count
    up_offset = n_size.to(tl.int64) * k_words
    sums = tl.zeros([BLOCKS, BLOCK_N, RUN // PIECES], tl.float32)
    if ACTIVATION is not None:
        ups = tl.zeros([BLOCKS, BLOCK_N, RUN // PIECES], tl.float32)
    low, low_end = load_table(table, 0)
    high, high_end = load_table(table, 1)
    for k in tl.range(0, 8 * k_words, BLOCKS * 8 * RUN):
        start = k + block * (8 * RUN)
        inside = start < 8 * k_words
        groups = scales + start // GROUP * STEP
        # The scales of a run are loaded and decoded once for all of its pieces.
        for number in tl.static_range(PIECES):
            at = k // 8 + number * (RUN // PIECES)
            values = x + k + number * (RUN // PIECES)
            first = read_once(words + at, inside, EVEN)
            sums = _vector(
                sums,
                first,
                values,
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
                pattern,
                inside,
                SIGNED,
                SELECT,
                EVEN,
                GROUP,
                STEP,
                RUN,
                BYTES,
            )
            if ACTIVATION is not None:
                second = read_once(words + up_offset + at, inside, EVEN)
                ups = _vector(
                    ups,
                    second,
                    values,
                    scale,
                    zeros,
                    table,
                    low,
                    low_end,
                    high,
                    high_end,
                    nested_code,
                    nested_factors,
                    groups + n_size.to(tl.int64) * count,
                    pattern,
                    inside,
                    SIGNED,
                    SELECT,
                    EVEN,
                    GROUP,
                    STEP,
                    RUN,
                    BYTES,
                )
    sums = tl.sum(tl.sum(sums, 2), 0)[None, :]
    if ACTIVATION is not None:
        ups = tl.sum(tl.sum(ups, 2), 0)[None, :]
    else:
        ups = sums
    write_result(sums, ups, None, bias, residual, out, tl.arange(0, 1), n, m_size, n_size, ACTIVATION, 1)


@triton.jit
def _vector(
    sums,
    words,
    x,
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
    pattern,
    inside,
    SIGNED: tl.constexpr,
    SELECT: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    RUN: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Add the products of the numbers in words [BLOCKS, N, RUN / pieces] and x to sums of the same shape."""
    # The number of runs that share a scale.
    RUNS: tl.constexpr = GROUP // RUN if GROUP < 8 * RUN else 8
    COUNT: tl.constexpr = 8 // RUNS if STEP else 1
    # Loading several 16-bit scales at once is not faster here.
    SCALES: tl.constexpr = 1 if scale.dtype.element_ty.primitive_bitwidth == 16 else COUNT
    first_factor, second_factor = factors_at(nested_factors, groups, inside, EVEN)
    for group in tl.static_range(8 // RUNS):
        part = 0.0
        if table is None:
            # x is multiplied by q, or by c + q / 128 with c = 1 or 16; the product with the number for 0 is subtracted
            zero = 8.0 if BYTES else 1.0625
            if zeros is not None:
                stored = stored_at(zeros, groups, group * STEP, inside, COUNT, EVEN).to(tl.int32)
                zero = stored.to(tl.float32) if BYTES else (stored << 16 | 0x3F800000).to(tl.float32, bitcast=True)
            for run in tl.static_range(RUNS):
                values = piece(x + (group * RUNS + run) * RUN, inside, EVEN).to(tl.float32)
                if BYTES or (group * RUNS + run) % 2:
                    part -= zero * values
                else:
                    part -= (zero + 15.0) * values
        for run in tl.static_range(RUNS):
            values = piece(x + (group * RUNS + run) * RUN, inside, EVEN).to(tl.float32)
            if table is not None:
                numbers = coded_run(words, low, low_end, high, high_end, group * RUNS + run, SIGNED, SELECT)
                part += values * numbers.to(tl.float16, bitcast=True).to(tl.float32)
            elif BYTES:
                part += values * _byte(words, pattern, group * RUNS + run)
            else:
                # Even runs contain 1 + q / 2048.
                values *= 1.0 if (group * RUNS + run) % 2 else 16.0
                part += values * _mantissa(words, pattern, group * RUNS + run)
        stored = stored_at(scale, groups, group * STEP, inside, SCALES, EVEN)
        factor = decoded_scale(stored, nested_code, first_factor, second_factor)
        if table is None and not BYTES:
            factor *= 128.0
        sums += part * factor
    return sums


@triton.jit
def factors_at(nested_factors, place, inside, EVEN: tl.constexpr):
    """The two factors that the scales of a block of 8 runs share. place: the index of the first of these scales.

    A block has 1, 2, 4 or 8 scales, all of which have the same factors. Without factors: two zeros.
    """
    if nested_factors is None:
        return 0.0, 0.0
    else:
        factors = nested_factors + (place >> 8) * 2
        return piece(factors, inside, EVEN), piece(factors + 1, inside, EVEN)


@triton.jit
def stored_at(numbers, place, index, inside, COUNT: tl.constexpr, EVEN: tl.constexpr):
    """Number `place` + index of a tensor. It is one of COUNT adjacent numbers, the first of which is number `place`.

    COUNT is a power of two, and place a multiple of it. If it is more than 1, index must be a constant: up to 8 bytes
    are loaded at once, and loads of the same bytes become one.
    """
    dtype: tl.constexpr = numbers.dtype.element_ty
    BITS: tl.constexpr = numbers.dtype.element_ty.primitive_bitwidth
    LOADED: tl.constexpr = COUNT if COUNT * BITS < 64 else 64 // BITS
    if LOADED == 1:
        return piece(numbers + place + index, inside, EVEN)
    else:
        integer: tl.constexpr = tl.int64 if LOADED * BITS == 64 else tl.int32 if LOADED * BITS == 32 else tl.int16
        at = numbers.to(tl.pointer_type(integer), bitcast=True) + (place // LOADED + index // LOADED)
        shifted = piece(at, inside, EVEN) >> (index % LOADED * BITS)
        narrow: tl.constexpr = tl.int32 if BITS == 32 else tl.int16 if BITS == 16 else tl.int8
        return shifted.to(narrow).to(dtype, bitcast=True)


@triton.jit
def decoded_scale(stored, nested_code, first_factor, second_factor):
    """Stored scales in fp32. first_factor, second_factor: see `factors_at`."""
    if nested_code is None:
        return power(stored) if stored.dtype == tl.uint8 else stored.to(tl.float32)
    else:
        return tl.load(nested_code + stored.to(tl.int32)) * first_factor + second_factor


@triton.jit
def power(scale):
    """2^(scale − 127) in fp32, and NaN for 255: a scale of MXFP4."""
    exponent = scale.to(tl.int32)
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def tiny_number(words, PLACE: tl.constexpr):
    """2⁻¹²⁶ times the e2m1 numbers at this place of the words, in fp32."""
    if PLACE < 6:
        magnitude = words << (22 - 4 * PLACE)
    else:
        magnitude = words >> (4 * PLACE - 22)
    sign = words << (28 - 4 * PLACE)
    return ((magnitude & 0x01C00000) | (sign & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def integers(words, run, DTYPE: tl.constexpr, SELECT: tl.constexpr):
    """`inserted` for the 4-bit numbers of a run."""
    if SELECT == _NVIDIA:
        base: tl.constexpr = 0x43004300 if tl.bfloat16 == DTYPE else 0x64006400
        numbers = tl.inline_asm_elementwise(
            _PAIR,
            "=r,r,r,r,r,r,r,r,r",
            [words, 0x7632 if run >= 4 else 0x5410, run % 4 * 4, base],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )
        return numbers.to(DTYPE, bitcast=True)
    return inserted((words >> (4 * run)) & 0xF, DTYPE)


@triton.jit
def inserted(numbers, DTYPE: tl.constexpr):
    """128 + q in bf16 or 1024 + q in fp16, for integers q from 0 to 16."""
    if tl.bfloat16 == DTYPE:
        return (numbers | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        tl.static_assert(tl.float16 == DTYPE)
        return (numbers | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _byte(words, pattern, RUN_INDEX: tl.constexpr):
    """The 4-bit numbers of a run, as floats."""
    if RUN_INDEX % 2:
        words >>= 4
    return (((words & pattern) >> (RUN_INDEX // 2 * 8)) & 0xFF).to(tl.float32)


@triton.jit
def _mantissa(words, pattern, RUN_INDEX: tl.constexpr):
    """1 + q / 128 for the 4-bit numbers q of an odd run, 1 + q / 2048 for an even one. Two runs share a shift."""
    if RUN_INDEX < 4:
        bits = words << (12 - RUN_INDEX // 2 * 8)
    else:
        bits = words >> (RUN_INDEX // 2 * 8 - 12)
    return ((bits & (0x000F0000 if RUN_INDEX % 2 else 0x0000F000)) | pattern).to(tl.float32, bitcast=True)


def build(
    kernel: Any,
    rows: int,
    n: int,
    k: int = 4096,
    *,
    activation: str | None = None,
    residual: bool = False,
    group: int = 128,
    zeros: bool = False,
    code: str | None = None,
    nested: bool = False,
    powers: bool = False,
    architectures: tuple[str, ...] = tuple(ARCHITECTURES),
) -> Build:
    """The build of a kernel for this number of rows and these sizes. powers: whether the scales are those of MXFP4."""
    run = run_length(k, group)
    gated, table = activation is not None, code is not None
    tile = four_bit_tile(rows, n, gated, run, table=table, rocm=True, arch=architectures[0])
    group, step = kernel_groups(k, group)
    tensors = {"x": "bf16", "weight": "i32", "zeros": "u8" * zeros, "out": "bf16", "residual": "bf16" * residual}
    tensors |= {"scale": "u8" if nested or powers else "fp32" if code else "bf16", "bias": ""}
    tensors |= {"table": "i64" * bool(code)}
    tensors |= dict.fromkeys(("nested_code", "nested_factors"), "fp32" * nested)
    return Build(
        kernel,
        {
            **{name: f"*{dtype}" for name, dtype in tensors.items() if dtype},
            **dict.fromkeys(("m_size", "n_size", "k_words", "pattern"), "i32"),
        },
        {
            **{name: None for name, dtype in tensors.items() if not dtype},
            "ACTIVATION": activation,
            "SIGNED": code in SIGNED,
            "SELECT": AMD,
            "EVEN": True,
            "GROUP": group,
            "STEP": step,
            "RUN": run,
            **({"SUBTRACTS": False} if tile.matrix else {"BYTES": True}),
            **tile.constants(),
        },
        threads=tile.threads,
        num_stages=tile.stages,
        divisible=("n_size", "k_words"),
        matrix=tile.matrix,
        architectures=architectures,
    )


BUILDS = (
    build(four_bit_vector, 1, 6144),
    build(four_bit_vector, 1, 4096, residual=True),
    build(four_bit_vector, 1, 14336, activation="silu"),
    build(four_bit_vector, 1, 6144, zeros=True),
    build(four_bit_vector, 1, 6144, group=64, code="nf4"),
    build(four_bit_vector, 1, 14336, activation="silu", group=64, code="nf4", nested=True),
    build(four_bit_vector, 1, 14336, activation="silu", group=32, code="e2m1", powers=True),
)
