"""Matrix instructions are compared with the operand maps of AMD's Matrix Instruction Calculator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from .machine import MachineError, UnknownInstruction
from .one import ARCHITECTURES, execute, lanes, program

# The published maps. `size` is the number of rows of A and of columns of B.
# A[i][k] is in lane i + size × (k // per lane), starting at the lowest bits of the lane's first register, where "per
# lane" is K × size / 64 (CDNA) or K / 2 (RDNA 4, where 16-bit elements alternate between the halves of the wave in
# groups of four). On RDNA 3 both halves of a wave contain all of K. B has the layout of A transposed.
MFMA16, MFMA32, INTERLEAVED, HALVES = "mfma16", "mfma32", "interleaved", "halves"


def row_of(layout: str, register: int, lane: int) -> int:
    """The row of C and D in a register of a lane. The column is the lane modulo the number of columns."""
    if layout == MFMA16:
        return 4 * (lane // 16) + register
    if layout == MFMA32:
        return 8 * (register // 4) + 4 * (lane // 32) + register % 4
    if layout == INTERLEAVED:
        return 2 * register + lane // 16
    return 8 * (lane // 16) + register


CASES = [
    *(("gfx90a", f"v_mfma_f32_16x16x{k}{kind}", 16, k, kind) for k, kind in ((16, "f16"), (8, "bf16"), (4, "f32"))),
    ("gfx90a", "v_mfma_f32_16x16x16bf16_1k", 16, 16, "bf16"),
    ("gfx90a", "v_mfma_f32_32x32x8bf16_1k", 32, 8, "bf16"),
    ("gfx90a", "v_mfma_f32_32x32x8f16", 32, 8, "f16"),
    ("gfx90a", "v_mfma_f32_32x32x2f32", 32, 2, "f32"),
    ("gfx90a", "v_mfma_i32_16x16x16i8", 16, 16, "i8"),
    ("gfx90a", "v_mfma_i32_32x32x8i8", 32, 8, "i8"),
    *(("gfx942", f"v_mfma_f32_16x16x{k}_{kind}", 16, k, kind) for k, kind in ((16, "f16"), (16, "bf16"), (4, "f32"))),
    *(("gfx942", f"v_mfma_f32_32x32x{k}_{kind}", 32, k, kind) for k, kind in ((8, "f16"), (8, "bf16"), (2, "f32"))),
    ("gfx942", "v_mfma_i32_16x16x32_i8", 16, 32, "i8"),
    ("gfx942", "v_mfma_i32_32x32x16_i8", 32, 16, "i8"),
    ("gfx942", "v_mfma_f32_16x16x32_fp8_fp8", 16, 32, "fp8fnuz"),
    ("gfx942", "v_mfma_f32_32x32x16_bf8_bf8", 32, 16, "bf8fnuz"),
    *(("gfx950", f"v_mfma_f32_16x16x{k}_{kind}", 16, k, kind) for k, kind in ((32, "f16"), (32, "bf16"), (4, "f32"))),
    *(("gfx950", f"v_mfma_f32_32x32x{k}_{kind}", 32, k, kind) for k, kind in ((16, "f16"), (16, "bf16"), (2, "f32"))),
    ("gfx950", "v_mfma_i32_16x16x64_i8", 16, 64, "i8"),
    ("gfx950", "v_mfma_f32_16x16x32_fp8_fp8", 16, 32, "fp8"),
    ("gfx950", "v_mfma_f32_16x16x128_f8f6f4", 16, 128, "fp8"),
    ("gfx950", "v_mfma_f32_32x32x64_f8f6f4", 32, 64, "fp8"),
    *(("gfx1100", f"v_wmma_f32_16x16x16_{kind}", 16, 16, kind) for kind in ("f16", "bf16")),
    ("gfx1100", "v_wmma_i32_16x16x16_iu8", 16, 16, "iu8"),
    ("gfx1100", "v_wmma_i32_16x16x16_iu4", 16, 16, "iu4"),
    *(("gfx1201", f"v_wmma_f32_16x16x16_{kind}", 16, 16, kind) for kind in ("f16", "bf16")),
    ("gfx1201", "v_wmma_f32_16x16x16_fp8_fp8", 16, 16, "fp8"),
    ("gfx1201", "v_wmma_f32_16x16x16_bf8_bf8", 16, 16, "bf8"),
    ("gfx1201", "v_wmma_i32_16x16x16_iu8", 16, 16, "iu8"),
    ("gfx1201", "v_wmma_i32_16x16x32_iu4", 16, 32, "iu4"),
]

FLOATS = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "bf8": torch.float8_e5m2,
    "fp8fnuz": torch.float8_e4m3fnuz,
    "bf8fnuz": torch.float8_e5m2fnuz,
}


def random_matrix(kind: str, rows: int, columns: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The codes and values of small integers, whose products and sums are exact in every type."""
    if kind in FLOATS:
        values = torch.from_numpy(generator.integers(-3, 4, (rows, columns))).to(FLOATS[kind])
        size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.element_size()]
        bits = 8 * values.element_size()
        codes = values.view(size).numpy().astype(np.int64) & (1 << bits) - 1
        return codes, values.double().numpy()
    bits = int(kind[-1])
    codes = generator.integers(0, 1 << bits, (rows, columns))
    signed = codes - ((codes >> (bits - 1)) << bits)
    return codes, (signed if kind == "i8" else codes).astype(np.float64)


def pack(arch: str, codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack a [rows, K] matrix into registers [registers, lanes] according to the published map."""
    size, depth = codes.shape
    count = lanes(arch)
    per_lane = depth if arch == "gfx1100" else depth * size // count
    registers = np.zeros((max(1, per_lane * bits // 32), count), np.uint32)
    for lane in range(count):
        for element in range(per_lane):
            group = 0 if arch == "gfx1100" else lane // size
            k = per_lane * group + element
            # Groups of four elements alternate between the halves of the wave.
            if arch == "gfx1201" and bits == 16:
                k = 8 * (element // 4) + 4 * group + element % 4
            place = element * bits
            registers[place // 32, lane] |= np.uint32(int(codes[lane % size, k]) << place % 32)
    return registers


def layout_of(arch: str, size: int) -> str:
    if arch.startswith("gfx9"):
        return MFMA16 if size == 16 else MFMA32
    return INTERLEAVED if arch == "gfx1100" else HALVES


@pytest.mark.parametrize(("arch", "mnemonic", "size", "depth", "kind"), CASES)
def test_products_match_the_published_map(arch, mnemonic, size, depth, kind):
    generator = np.random.default_rng(0)
    a_codes, a = random_matrix(kind, size, depth, generator)
    # B is [K, columns]; its columns are packed like rows.
    b_codes, b = random_matrix(kind, size, depth, generator)
    bits = 8 * FLOATS[kind].itemsize if kind in FLOATS else int(kind[-1])
    left, right = pack(arch, a_codes, bits), pack(arch, b_codes, bits)
    count, layout = size * size // lanes(arch), layout_of(arch, size)
    c = generator.integers(-5, 6, (size, size))
    integer = kind in ("i8", "iu8", "iu4")
    registers, last = {}, len(left) - 1
    for i in range(len(left)):
        registers |= {f"v{i}": left[i], f"v{16 + i}": right[i]}
    dtype = np.int32 if integer else np.float32
    for i in range(count):
        value = [c[row_of(layout, i, lane), lane % size] for lane in range(lanes(arch))]
        registers[f"v{32 + i}"] = np.array(value, dtype)
    operands = [f"v[{start}:{start + last}]" if last else f"v{start}" for start in (0, 16)]
    text = f"{mnemonic} v[48:{47 + count}], {operands[0]}, {operands[1]}, v[32:{31 + count}]"
    state = execute(arch, text, registers)
    expected = a @ b.T + c
    for register in range(count):
        actual = state.v[48 + register, 0].view(dtype)
        lane_values = [expected[row_of(layout, register, lane), lane % size] for lane in range(lanes(arch))]
        np.testing.assert_array_equal(actual, np.array(lane_values, dtype))


def test_single_entries_of_the_published_map():
    """Check single entries that the calculator prints, such as A[1][5] of 16x16x16 on CDNA 3: v0.[31:16] of lane 17."""
    codes = np.zeros((16, 16), np.int64)
    codes[1, 5] = 1
    packed = pack("gfx942", codes, 16)
    assert packed[0, 17] == 1 << 16 and np.count_nonzero(packed) == 1
    codes = np.zeros((16, 16), np.int64)
    codes[3, 9] = 1
    packed = pack("gfx1201", codes, 16)
    assert packed[2, 3] == 1 << 16 and np.count_nonzero(packed) == 1
    packed = pack("gfx1100", codes, 16)
    assert packed[4, 3] == packed[4, 19] == 1 << 16 and np.count_nonzero(packed) == 2
    assert row_of(MFMA32, 5, 33) == 13 and row_of(INTERLEAVED, 3, 20) == 7


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201"])
def test_signs_of_integer_products(arch):
    registers = {f"v{i}": np.uint32(0xFFFFFFFF) for i in range(8)} | {f"v{8 + i}": 0 for i in range(8)}
    size = 4 if arch == "gfx1100" else 2
    for signs, expected in (((0, 0), 255 * 255), ((1, 0), -255), ((1, 1), 1)):
        operands = f"v[8:15], v[0:{size - 1}], v[4:{3 + size}], v[8:15]"
        text = f"v_wmma_i32_16x16x16_iu8 {operands} neg_lo:[{signs[0]},{signs[1]},0]"
        state = execute(arch, text, registers)
        assert (state.v[8:16, 0].view(np.int32) == 16 * expected).all()


def test_two_halves_of_a_wave_must_agree_on_rdna3():
    registers = {f"v{i}": np.arange(32, dtype=np.uint32) for i in range(8)}
    with pytest.raises(MachineError, match="two halves"):
        execute("gfx1100", "v_wmma_f32_16x16x16_f16 v[8:15], v[0:7], v[0:7], 0", registers)


def test_subnormal_numbers_are_flushed_only_on_gfx90a():
    # 2**-133 in both halves, as bf16.
    subnormal = np.uint32(0x00010001)
    registers = {"v0": subnormal, "v1": subnormal, "v2": 0x7F007F00, "v3": 0x7F007F00}
    old = execute("gfx90a", "v_mfma_f32_16x16x16bf16_1k v[4:7], v[0:1], v[2:3], 0", registers)
    new = execute("gfx942", "v_mfma_f32_16x16x16_bf16 v[4:7], v[0:1], v[2:3], 0", registers)
    assert (old.vf[4:8] == 0).all()
    assert (new.vf[4:8] == 16 * 2.0**-133 * 2.0**127).all()


def test_mixed_eight_bit_formats():
    """Multiply bf8 codes by fp8 codes in gfx942's formats, where 1.0 is 0x40 in both."""
    registers = {"v0": 0x40404040, "v1": 0x40404040, "v2": 0x40404040, "v3": 0x48484848}
    state = execute("gfx942", "v_mfma_f32_16x16x32_bf8_fp8 v[4:7], v[0:1], v[2:3], 0", registers)
    assert (state.vf[4:8] == 16 * 1.0 + 16 * 2.0).all()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_instructions_of_other_architectures_are_unknown(arch):
    foreign = "v_wmma_f32_16x16x16_f16 v[0:7], v[0:7], v[0:7], 0"
    if not arch.startswith("gfx9"):
        foreign = "v_mfma_f32_16x16x16_f16 v[0:3], v[0:1], v[0:1], 0"
    with pytest.raises(UnknownInstruction):
        program(arch, foreign)
