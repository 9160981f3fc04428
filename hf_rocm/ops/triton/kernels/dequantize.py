"""Convert 8- or 4-bit weights to another dtype in one pass: each program writes a part of one row."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.four_bit import SIGNED, kernel_groups, run_length
from hf_rocm.ops.triton.builds import ARCHITECTURES, Build
from hf_rocm.ops.triton.kernels.codes import AMD, coded_run, load_table
from hf_rocm.ops.triton.kernels.eight_bit import to_fp32
from hf_rocm.ops.triton.kernels.four_bit import decoded_scale, factors_at
from hf_rocm.ops.triton.tiles import dequantize_tile


@triton.jit
def dequantize_eight(
    weight,  # [N, K] int8 or fp8
    scale,  # [N] fp32, or [⌈N / GROUP⌉, ⌈K / GROUP⌉]
    out,  # [N, K]
    k_size,
    # Rows and columns that share a scale; 0: each row has one scale.
    GROUP: tl.constexpr,
    SELECT: tl.constexpr,  # see `eight_bit.to_fp32`
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if GROUP:
        block = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)[:, None]
        count = tl.cdiv(k_size, GROUP)
        factor = tl.load(scale + row // GROUP * count + block, mask=block < count)
        k = block * GROUP + tl.arange(0, GROUP)[None, :]
    else:
        factor = tl.load(scale + row)
        k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < k_size
    numbers = to_fp32(tl.load(weight + row * k_size + k, mask=inside), SELECT) * factor
    tl.store(out + row * k_size + k, numbers.to(out.dtype.element_ty), mask=inside)


@triton.jit
def dequantize_four(
    weight,  # [N, K / 8] int32, see `ops.four_bit`
    scale,  # [N, K / GROUP], or [N, 1] if STEP is 0
    # Of scale's shape, uint8, or None.
    zeros,
    # As in `four_bit_vector`, but in fp32.
    table,
    nested_code,
    nested_factors,
    out,  # [N, K]
    k_words,  # K / 8
    SIGNED: tl.constexpr,  # see `coded`
    SELECT: tl.constexpr,
    # Numbers that share a scale.
    GROUP: tl.constexpr,
    # 0 if each row has one scale, else 1.
    STEP: tl.constexpr,
    # The length of a run.
    RUN: tl.constexpr,
    # The number of blocks, of 8 runs each, that are loaded at once.
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = (tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS))[:, None]
    within = tl.arange(0, RUN)[None, :]
    inside = block * RUN < k_words
    words = tl.load(weight + row * k_words + block * RUN + within, mask=inside)
    offset = row * (k_words // (GROUP // 8) if STEP else 1)
    out += row * k_words * 8
    byte_0, byte_0_end = load_table(table, 0)
    byte_1, byte_1_end = load_table(table, 1)
    byte_2, byte_2_end = load_table(table, 2)
    byte_3, byte_3_end = load_table(table, 3)
    groups = offset + block * (8 * RUN) // GROUP * STEP
    first_factor, second_factor = factors_at(nested_factors, groups, inside, False)
    for run in tl.static_range(8):
        start = (block * 8 + run) * RUN
        group = offset + start // GROUP * STEP
        if table is not None:
            lower = coded_run(words, byte_0, byte_0_end, byte_1, byte_1_end, run, SIGNED, SELECT).to(tl.int32) & 0xFFFF
            upper = coded_run(words, byte_2, byte_2_end, byte_3, byte_3_end, run, SIGNED, SELECT).to(tl.int32) << 16
            numbers = (upper | lower).to(tl.float32, bitcast=True)
        else:
            # The last bits of the float 2²³ + q are q, and a subtraction is faster than a conversion from an integer.
            numbers = (((words >> (4 * run)) & 0xF) | 0x4B000000).to(tl.float32, bitcast=True)
            if zeros is None:
                numbers -= 8388616.0
            else:
                numbers = (numbers - 8388608.0) - tl.load(zeros + group, mask=inside).to(tl.float32)
        stored = tl.load(scale + group, mask=inside, other=0.0)
        numbers *= decoded_scale(stored, nested_code, first_factor, second_factor)
        tl.store(out + start + within, numbers.to(out.dtype.element_ty), mask=inside)


def _build(
    k: int,
    weight: str,
    *,
    out: str = "bf16",
    group: int = 0,
    zeros: bool = False,
    code: str | None = None,
    nested: bool = False,
    powers: bool = False,
    arch: str | None = None,
) -> Build:
    four = weight == "i32"
    run = run_length(k, group) if four else 0
    block, threads = dequantize_tile(k, run)
    step = 1
    if four:
        group, step = kernel_groups(k, group)
    size = "k_words" if four else "k_size"
    scale = "u8" if nested or powers else "bf16" if four and not code else "fp32"
    tensors = {"weight": weight, "scale": scale, "out": out}
    if four:
        tensors |= {"zeros": "u8" * zeros, "table": "i64" * bool(code)}
        tensors |= dict.fromkeys(("nested_code", "nested_factors"), "fp32" * nested)
    constants: dict[str, object] = {"GROUP": group, "SELECT": AMD, "BLOCK": block}
    if four:
        constants = {"SIGNED": code in SIGNED, "SELECT": AMD}
        constants |= {"GROUP": group, "STEP": step, "RUN": run, "BLOCKS": block}
    return Build(
        dequantize_four if four else dequantize_eight,
        {**{name: f"*{dtype}" for name, dtype in tensors.items() if dtype}, size: "i32"},
        {**{name: None for name, dtype in tensors.items() if not dtype}, **constants},
        threads=threads,
        divisible=(size,),
        architectures=tuple(ARCHITECTURES) if arch is None else (arch,),
    )


BUILDS = (
    _build(4096, "i8"),
    _build(4096, "fp8e4nv"),
    _build(4096, "fp8e4b8", arch="gfx942"),
    _build(4096, "fp8e4nv", group=128),
    _build(4096, "i32", group=128),
    _build(4096, "i32", group=32, out="fp16"),
    _build(4096, "i32", group=128, zeros=True),
    _build(4096, "i32", group=64, code="nf4"),
    _build(4096, "i32", group=64, code="nf4", nested=True),
    _build(4096, "i32", group=32, code="e2m1", powers=True),
)
