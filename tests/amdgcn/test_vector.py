"""The results of integer, bitwise and comparison instructions on vectors equal the formulas in AMD's ISA documents,
evaluated with Python numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from .machine import UnknownInstruction
from .one import ARCHITECTURES, CDNA, execute, lanes, program, scalar, vector

WORD = 0xFFFFFFFF
EDGES = [0, 1, 2, 31, 32, 33, 0x7F, 0x80, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, WORD]


def values(arch: str, seed: int) -> np.ndarray:
    """Edge cases in some lanes, random values in the others."""
    generator = np.random.default_rng(seed)
    words = generator.integers(0, 2**32, lanes(arch), np.uint32)
    places = generator.permutation(lanes(arch))[: len(EDGES)]
    words[places] = EDGES
    return words


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (x >> (bits - 1) << bits)


def bfe_signed(a: int, b: int, c: int) -> int:
    width = c & 31
    return signed(a >> (b & 31), width) if width else 0


def permuted(a: int, b: int, c: int) -> int:
    """v_perm_b32: selectors 0-7 select a byte of {a, b}, 8-11 the sign of a half, 12 gives 0, larger ones 255."""
    both = (a << 32 | b).to_bytes(8, "little")
    result = []
    for place in range(4):
        code = c >> 8 * place & 255
        if code < 8:
            result.append(both[code])
        elif code < 12:
            result.append(255 if both[2 * (code - 8) + 1] & 0x80 else 0)
        else:
            result.append(0 if code == 12 else 255)
    return int.from_bytes(bytes(result), "little")


def sign_bits(a: int) -> int:
    """The number of leading bits that equal the sign; -1 if all do."""
    return next((count for count in range(1, 32) if (a >> 31 - count ^ a >> 31) & 1), -1)


def median(*numbers: int) -> int:
    return sorted(numbers)[1]


# mnemonic -> formula of the sources; the result is reduced modulo 2**32
FORMULAS: dict[str, Callable[..., int]] = {
    "v_and_b32_e32": lambda a, b: a & b,
    "v_or_b32_e32": lambda a, b: a | b,
    "v_xor_b32_e32": lambda a, b: a ^ b,
    "v_not_b32_e32": lambda a: ~a,
    "v_bfrev_b32_e32": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_lshlrev_b32_e32": lambda a, b: b << (a & 31),
    "v_lshrrev_b32_e32": lambda a, b: b >> (a & 31),
    "v_ashrrev_i32_e32": lambda a, b: signed(b) >> (a & 31),
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
    "v_lshl_or_b32": lambda a, b, c: a << (b & 31) | c,
    "v_add_lshl_u32": lambda a, b, c: (a + b) << (c & 31),
    "v_bfe_u32": lambda a, b, c: a >> (b & 31) & (1 << (c & 31)) - 1,
    "v_bfe_i32": bfe_signed,
    "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
    "v_perm_b32": permuted,
    "v_alignbit_b32": lambda a, b, c: (a << 32 | b) >> (c & 31),
    "v_alignbyte_b32": lambda a, b, c: (a << 32 | b) >> 8 * (c & 3),
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": lambda a, b: a * b >> 32,
    "v_mul_hi_i32": lambda a, b: signed(a) * signed(b) >> 32,
    "v_mul_u32_u24_e32": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "v_mul_i32_i24_e32": lambda a, b: signed(a, 24) * signed(b, 24),
    "v_mad_u32_u24": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "v_mad_i32_i24": lambda a, b, c: signed(a, 24) * signed(b, 24) + c,
    "v_max_i32_e32": lambda a, b: max(signed(a), signed(b)),
    "v_min_i32_e32": lambda a, b: min(signed(a), signed(b)),
    "v_max_u32_e32": max,
    "v_min_u32_e32": min,
    "v_max3_i32": lambda a, b, c: max(signed(a), signed(b), signed(c)),
    "v_max3_u32": max,
    "v_min3_i32": lambda a, b, c: min(signed(a), signed(b), signed(c)),
    "v_med3_i32": lambda a, b, c: median(signed(a), signed(b), signed(c)),
    "v_med3_u32": median,
    "v_bcnt_u32_b32": lambda a, b: a.bit_count() + b,
    "v_bfm_b32": lambda a, b: ((1 << (a & 31)) - 1) << (b & 31),
    "v_mad_u32_u16": lambda a, b, c: (a & 0xFFFF) * (b & 0xFFFF) + c,
    "v_mad_i32_i16": lambda a, b, c: signed(a, 16) * signed(b, 16) + c,
    "v_sad_u32": lambda a, b, c: abs(a - b) + c,
}
BY_GENERATION: dict[bool, dict[str, Callable[..., int]]] = {
    True: {
        "v_add_u32_e32": lambda a, b: a + b,
        "v_sub_u32_e32": lambda a, b: a - b,
        "v_subrev_u32_e32": lambda a, b: b - a,
        "v_ffbh_u32_e32": lambda a: 32 - a.bit_length() if a else -1,
        "v_ffbh_i32_e32": sign_bits,
        "v_ffbl_b32_e32": lambda a: (a & -a).bit_length() - 1,
        "v_lshlrev_b16_e32": lambda a, b: b << (a & 15) & 0xFFFF,
        "v_lshrrev_b16_e32": lambda a, b: (b & 0xFFFF) >> (a & 15),
        "v_add_u16_e32": lambda a, b: a + b & 0xFFFF,
        "v_mul_lo_u16_e32": lambda a, b: a * b & 0xFFFF,
    },
    False: {
        "v_add_nc_u32_e32": lambda a, b: a + b,
        "v_sub_nc_u32_e32": lambda a, b: a - b,
        "v_subrev_nc_u32_e32": lambda a, b: b - a,
        "v_xor3_b32": lambda a, b, c: a ^ b ^ c,
        "v_xnor_b32_e32": lambda a, b: ~(a ^ b),
        "v_clz_i32_u32_e32": lambda a: 32 - a.bit_length() if a else -1,
        "v_cls_i32_e32": sign_bits,
        "v_ctz_i32_b32_e32": lambda a: (a & -a).bit_length() - 1,
    },
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_instructions_equal_their_formulas(arch):
    sources = [values(arch, seed) for seed in range(3)]
    for mnemonic, formula in {**FORMULAS, **BY_GENERATION[arch in CDNA]}.items():
        count = formula.__code__.co_argcount if hasattr(formula, "__code__") else 0
        count = count or (3 if "3" in mnemonic.split("_")[1] else 2)
        names = ", ".join(f"v{i + 1}" for i in range(count))
        state = execute(arch, f"{mnemonic} v9, {names}", {f"v{i + 1}": source for i, source in enumerate(sources)})
        expected = [formula(*map(int, row)) & WORD for row in zip(*sources[:count], strict=True)]
        np.testing.assert_array_equal(vector(state, "v9"), np.array(expected, np.uint32), err_msg=mnemonic)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_carries(arch):
    """The carries into and out of an addition or a subtraction are lane masks."""
    a, b = values(arch, 1), values(arch, 2)
    carry = int(np.random.default_rng(3).integers(0, 2**63)) & (1 << lanes(arch)) - 1
    cdna = arch in CDNA
    mask = "s[4:5]" if cdna else "s4"
    other = "s[6:7]" if cdna else "s6"
    adds, subs, reverse = (
        ("v_addc_co_u32_e64", "v_subb_co_u32_e64", "v_subbrev_co_u32_e64")
        if cdna
        else ("v_add_co_ci_u32_e64", "v_sub_co_ci_u32_e64", "v_subrev_co_ci_u32_e64")
    )
    plain = "v_add_co_u32_e64" if cdna else "v_add_co_u32"
    cases = {
        f"{plain} v3, {other}, v1, v2": lambda x, y, c: x + y,
        f"{plain.replace('add', 'sub')} v3, {other}, v1, v2": lambda x, y, c: x - y,
        f"{adds} v3, {other}, v1, v2, {mask}": lambda x, y, c: x + y + c,
        f"{subs} v3, {other}, v1, v2, {mask}": lambda x, y, c: x - y - c,
        f"{reverse} v3, {other}, v1, v2, {mask}": lambda x, y, c: y - x - c,
    }
    for text, formula in cases.items():
        state = execute(arch, text, {"v1": a, "v2": b, mask: carry})
        sums = [formula(int(x), int(y), carry >> lane & 1) for lane, (x, y) in enumerate(zip(a, b, strict=True))]
        np.testing.assert_array_equal(vector(state, "v3"), np.array([x & WORD for x in sums], np.uint32), err_msg=text)
        flags = sum(int(not 0 <= total <= WORD) << lane for lane, total in enumerate(sums))
        assert scalar(state, other) == flags, text


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_64_bit_instructions_equal_their_formulas(arch):
    low, high, amount = values(arch, 4), values(arch, 5), values(arch, 6)
    wide = [int(h) << 32 | int(x) for x, h in zip(low, high, strict=True)]
    registers = {"v2": low, "v3": high, "v4": amount, "v5": values(arch, 7)}
    suffix = "_e32" if arch == "gfx1201" else ""
    multiply = "v_mad_co_{0} v[6:7], null" if arch == "gfx1201" else "v_mad_{0} v[6:7], s[4:5]"
    product = [int(x) * int(y) for x, y in zip(amount, registers["v5"], strict=True)]
    cases = {
        f"v_lshlrev_b64{suffix} v[6:7], v4, v[2:3]": [x << (int(n) & 63) for x, n in zip(wide, amount, strict=True)],
        "v_lshrrev_b64 v[6:7], v4, v[2:3]": [x >> (int(n) & 63) for x, n in zip(wide, amount, strict=True)],
        "v_ashrrev_i64 v[6:7], v4, v[2:3]": [signed(x, 64) >> (int(n) & 63) for x, n in zip(wide, amount, strict=True)],
        multiply.format("u64_u32") + ", v4, v5, v[2:3]": [x + y for x, y in zip(product, wide, strict=True)],
        multiply.format("i64_i32") + ", v4, v5, v[2:3]": [
            signed(int(x)) * signed(int(y)) + z for x, y, z in zip(amount, registers["v5"], wide, strict=True)
        ],
    }
    if arch in ("gfx942", "gfx950"):
        cases["v_lshl_add_u64 v[6:7], v[2:3], 3, v[4:5]"] = [
            (x << 3) + (int(y) | int(z) << 32) for x, y, z in zip(wide, amount, registers["v5"], strict=True)
        ]
        cases["v_mov_b64_e32 v[6:7], v[2:3]"] = wide
    for text, expected in cases.items():
        state = execute(arch, text, registers)
        actual = [int(x) | int(y) << 32 for x, y in zip(vector(state, "v6"), vector(state, "v7"), strict=True)]
        assert actual == [x & 2**64 - 1 for x in expected], text


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["i32", "u32", "f32"])
def test_comparisons(arch, kind):
    a, b = values(arch, 8), values(arch, 9)
    b[::5] = a[::5]
    mask = "s[4:5]" if arch in CDNA else "s4"
    number: Callable[[int], float] = {
        "i32": signed,
        "u32": int,
        "f32": lambda x: float(np.uint32(x).view(np.float32)),
    }[kind]
    names: dict[str, Callable[[float, float], bool]] = {
        "lt": lambda x, y: x < y,
        "eq": lambda x, y: x == y,
        "le": lambda x, y: x <= y,
        "gt": lambda x, y: x > y,
        "ge": lambda x, y: x >= y,
    }
    if kind == "f32":
        names |= {
            "lg": lambda x, y: x < y or x > y,
            "o": lambda x, y: x == x and y == y,
            "u": lambda x, y: x != x or y != y,
            "nge": lambda x, y: not x >= y,
            "nlg": lambda x, y: not (x < y or x > y),
            "ngt": lambda x, y: not x > y,
            "nle": lambda x, y: not x <= y,
            "neq": lambda x, y: x != y,
            "nlt": lambda x, y: not x < y,
        }
    else:
        names["ne"] = lambda x, y: x != y
    active = 0x0F0F0F0FFFFF00F1 & (1 << lanes(arch)) - 1
    for name, function in names.items():
        text = f"v_cmp_{name}_{kind}_e64 {mask}, v1, v2"
        state = execute(arch, text, {"v1": a, "v2": b, mask: 2**64 - 1}, active=active)
        lane_results = [function(number(int(x)), number(int(y))) for x, y in zip(a, b, strict=True)]
        expected = sum(int(flag) << lane for lane, flag in enumerate(lane_results)) & active
        assert scalar(state, mask) == expected, text


def test_comparisons_may_write_exec():
    """v_cmpx writes EXEC on RDNA, so later instructions run in fewer lanes."""
    values = {"v1": np.arange(32, dtype=np.uint32), "v2": 7}
    state = execute("gfx1100", ["v_cmpx_gt_i32_e32 10, v1", "v_mov_b32_e32 v2, 1"], values)
    assert list(vector(state, "v2")) == [1] * 10 + [7] * 22


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_inactive_lanes_keep_their_registers(arch):
    state = execute(arch, "v_mov_b32_e32 v1, 5", {"v1": 9}, active=0b1010)
    assert [int(x) for x in vector(state, "v1")[:5]] == [9, 5, 9, 5, 9]


def test_both_halves_of_a_pair_read_before_either_writes():
    state = execute("gfx1100", "v_dual_mov_b32 v1, v2 :: v_dual_mov_b32 v2, v1", {"v1": 3, "v2": 4})
    assert (vector(state, "v1") == 4).all() and (vector(state, "v2") == 3).all()


def test_bitop3_is_a_truth_table():
    a, b, c = 0b11110000, 0b11001100, 0b10101010
    for table in (0x78, 0xDE, 0x36, 0x6C, 0x01, 0x80):
        state = execute("gfx950", f"v_bitop3_b32 v4, v1, v2, v3 bitop3:{table:#x}", {"v1": a, "v2": b, "v3": c})
        assert int(vector(state, "v4")[0]) & 255 == table


def test_bitop3_of_16_bits_reads_and_writes_the_halves_that_op_sel_selects():
    a, b, c = 0b11110000, 0b11001100, 0b10101010
    rest = {"v2": b, "s3": c, "v4": 0xBEEF5555}
    low, high = {"v1": a, **rest}, {"v1": a << 16, **rest}
    for table in (0x78, 0xDE, 0xF8, 0x01):
        text = f"v_bitop3_b16 v4, v1, v2, s3 bitop3:{table:#x}"
        expected = sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(16))
        plain = execute("gfx950", text, low)
        assert int(vector(plain, "v4")[0]) == 0xBEEF0000 | expected, hex(table)
        placed = execute("gfx950", f"{text} op_sel:[1,0,0,1]", high)
        assert int(vector(placed, "v4")[0]) == expected << 16 | 0x5555, hex(table)


@pytest.mark.parametrize("operation", ["add", "sub"])
def test_sdwa_with_a_carry(operation):
    """`v_add_co_u32_sdwa` and `v_sub_co_u32_sdwa` read a byte, and write the carry to vcc."""
    a, b = values("gfx90a", 1), values("gfx90a", 2)
    a[::2] = WORD - 3 if operation == "add" else 3
    text = (
        f"v_{operation}_co_u32_sdwa v3, vcc, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_3"
    )
    state = execute("gfx90a", text, {"v1": a, "v2": b})
    sign = 1 if operation == "add" else -1
    sums = [int(x) + sign * (int(y) >> 24) for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(vector(state, "v3"), np.array([x & WORD for x in sums], np.uint32))
    carries = sum(int(not 0 <= total <= WORD) << lane for lane, total in enumerate(sums))
    assert 0 < scalar(state, "vcc") == carries
    with pytest.raises(UnknownInstruction, match="must write the whole register"):
        execute("gfx90a", text.replace("dst_sel:DWORD", "dst_sel:WORD_0"), {"v1": a, "v2": b})


def test_sdwa_selects_parts_of_the_sources_and_of_the_destination():
    registers = {"v1": 0x44332211, "v2": 0x88776655, "v3": 0xAAAABBBB}
    cases = {
        "v_and_b32_sdwa v3, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_1": 0x44332211
        & 0x66,
        "v_or_b32_sdwa v3, v1, v2 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:WORD_0 src1_sel:BYTE_0": 0x22550000,
        "v_or_b32_sdwa v3, v1, v2 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_3 src1_sel:BYTE_3": (
            0xAAAACCBB
        ),
        "v_add_u32_sdwa v3, v1, sext(v2) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:BYTE_3": (
            0x11 - 0x78 & WORD
        ),
    }
    for text, expected in cases.items():
        state = execute("gfx942", text, registers)
        assert int(vector(state, "v3")[0]) == expected, text


@pytest.mark.parametrize(("arch", "kept"), [("gfx942", 0), ("gfx1100", 0xABCD0000)])
def test_sixteen_bits_clear_or_keep_the_other_half(arch, kept):
    suffix = "_e32" if arch == "gfx942" else ""
    state = execute(arch, f"v_lshlrev_b16{suffix} v1, 4, v2", {"v1": 0xABCD1234, "v2": 0xFFFF0123})
    assert int(vector(state, "v1")[0]) == kept | 0x1230


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_constants(arch):
    """Inline float constants are float32 bits, in integer operands too; literals are plain bits."""
    lines = ["v_mov_b32_e32 v1, 0.5", "v_mov_b32_e32 v2, -4.0", "v_mov_b32_e32 v3, -1", "v_mov_b32_e32 v4, 0x42280000"]
    state = execute(arch, lines)
    assert [int(state.v[i, 0, 0]) for i in range(1, 5)] == [0x3F000000, 0xC0800000, WORD, 0x42280000]


def test_unimplemented_instructions_are_named():
    for line in (
        "v_nosuch_b32 v0, v1",
        "v_add_u32_e32 v0, v1, v2 wrong:1",
        "v_mov_b32_e32 v0, lds_direct",
        "v_add_f32_dpp v0, v1, v2 row_nosuch:1",
        "s_nosuch_b32 s0, s1",
        "global_load_lds_dword v[0:1], off",
        "s_waitcnt depctr(0)",
    ):
        with pytest.raises(UnknownInstruction, match=line.split()[0]):
            program("gfx942", line)
