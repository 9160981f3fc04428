"""Scalar instructions are compared with the formulas in AMD's ISA documents."""

from __future__ import annotations

import numpy as np
import pytest

from .machine import UnknownInstruction
from .one import ARCHITECTURES, CDNA, RDNA, execute, lanes, scalar

WORD = 0xFFFFFFFF
EDGES = [0, 1, 31, 32, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, WORD, 0x12345678]


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (x >> (bits - 1) << bits)


def overflows(x: int) -> int:
    return int(not -(2**31) <= x < 2**31)


def scc(arch: str, text: str, registers: dict[str, int]) -> tuple[int, int]:
    """Execute an instruction with these registers. Returns the 64-bit result in s[8:9], and SCC."""
    state = execute(arch, text, {"s[8:9]": 0, **registers})
    return scalar(state, "s[8:9]"), int(state.scc[0])


# name -> (result, SCC or None if it does not change) of 32-bit sources, on all architectures
BOTH = {
    "s_and_b32": lambda a, b: (a & b, int(a & b != 0)),
    "s_or_b32": lambda a, b: (a | b, int(a | b != 0)),
    "s_xor_b32": lambda a, b: (a ^ b, int(a ^ b != 0)),
    "s_lshl_b32": lambda a, b: (a << (b & 31) & WORD, int(a << (b & 31) & WORD != 0)),
    "s_lshr_b32": lambda a, b: (a >> (b & 31), int(a >> (b & 31) != 0)),
    "s_ashr_i32": lambda a, b: (signed(a) >> (b & 31) & WORD, int(signed(a) >> (b & 31) & WORD != 0)),
    "s_mul_i32": lambda a, b: (a * b & WORD, None),
    "s_mul_hi_u32": lambda a, b: (a * b >> 32, None),
    "s_mul_hi_i32": lambda a, b: (signed(a) * signed(b) >> 32 & WORD, None),
    "s_min_i32": lambda a, b: (min(signed(a), signed(b)) & WORD, int(signed(a) <= signed(b))),
    "s_max_i32": lambda a, b: (max(signed(a), signed(b)) & WORD, int(signed(a) >= signed(b))),
    "s_min_u32": lambda a, b: (min(a, b), int(a <= b)),
    "s_max_u32": lambda a, b: (max(a, b), int(a >= b)),
    "s_pack_ll_b32_b16": lambda a, b: (a & 0xFFFF | (b & 0xFFFF) << 16, None),
    "s_pack_hh_b32_b16": lambda a, b: (a >> 16 | b >> 16 << 16, None),
}
RENAMED = {
    "s_add_u32": ("s_add_co_u32", lambda a, b: (a + b & WORD, int(a + b > WORD))),
    "s_sub_u32": ("s_sub_co_u32", lambda a, b: (a - b & WORD, int(a < b))),
    "s_add_i32": ("s_add_co_i32", lambda a, b: (a + b & WORD, overflows(signed(a) + signed(b)))),
    "s_sub_i32": ("s_sub_co_i32", lambda a, b: (a - b & WORD, overflows(signed(a) - signed(b)))),
    "s_addc_u32": ("s_add_co_ci_u32", lambda a, b: (a + b + 1 & WORD, int(a + b + 1 > WORD))),
    "s_subb_u32": ("s_sub_co_ci_u32", lambda a, b: (a - b - 1 & WORD, int(a - b - 1 < 0))),
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_32_bit_instructions_equal_their_formulas(arch):
    formulas = dict(BOTH)
    for old, (new, formula) in RENAMED.items():
        formulas[new if arch == "gfx1201" else old] = formula
    set_scc = "s_cmp_eq_u32 0, 0"
    for a in EDGES:
        for name, formula in formulas.items():
            for b in (1, 0x80000000, WORD, 0x00040008):
                state = execute(arch, [set_scc, f"{name} s6, s4, s5"], {"s4": a, "s5": b})
                result, flag = formula(a, b)
                assert (scalar(state, "s6"), int(state.scc[0])) == (result, 1 if flag is None else flag), (name, a, b)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_64_bit_instructions_equal_their_formulas(arch):
    a, b = 0x8123456789ABCDEF, 0x00FF00FF0F0F0F0F
    negated = "and_not1" if arch in RDNA else "andn2"
    cases = {
        "s_and_b64 s[8:9], s[4:5], s[6:7]": a & b,
        "s_or_b64 s[8:9], s[4:5], s[6:7]": a | b,
        f"s_{negated}_b64 s[8:9], s[4:5], s[6:7]": a & ~b,
        "s_not_b64 s[8:9], s[4:5]": ~a,
        "s_lshl_b64 s[8:9], s[4:5], 37": a << 37,
        "s_lshr_b64 s[8:9], s[4:5], 37": a >> 37,
        "s_ashr_i64 s[8:9], s[4:5], 37": signed(a, 64) >> 37,
        "s_brev_b64 s[8:9], s[4:5]": int(f"{a:064b}"[::-1], 2),
        "s_mov_b64 s[8:9], -2": -2,
        "s_bfe_u64 s[8:9], s[4:5], 0x140008": a >> 8 & (1 << 20) - 1,
        "s_bfe_i64 s[8:9], s[4:5], 0x80038": signed(a >> 56, 8),
    }
    if arch == "gfx1201":
        cases["s_add_nc_u64 s[8:9], s[4:5], s[6:7]"] = a + b
        cases["s_mul_u64 s[8:9], s[4:5], s[6:7]"] = a * b
    for text, expected in cases.items():
        assert scc(arch, text, {"s[4:5]": a, "s[6:7]": b})[0] == expected & 2**64 - 1, text


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_single_operands_and_immediates_are_supported(arch):
    add = "s_addk_co_i32" if arch == "gfx1201" else "s_addk_i32"
    cases = {
        "s_abs_i32 s8, s4": {0x80000000: 0x80000000, WORD: 1, 7: 7},
        "s_brev_b32 s8, s4": {1: 0x80000000, 0x80000001: 0x80000001},
        "s_not_b32 s8, s4": {0: WORD},
        "s_bfe_u32 s8, s4, 0x80008": {0x12345678: 0x56},
        "s_bfe_i32 s8, s4, 0x1001a": {1 << 26: WORD, 0: 0},
        "s_movk_i32 s8, 0x8000": {0: 0xFFFF8000},
        "s_sext_i32_i8 s8, s4": {0x80: 0xFFFFFF80},
        "s_bcnt1_i32_b32 s8, s4": {0xF0F0: 8},
        f"{'s_flbit_i32' if arch in CDNA else 's_cls_i32'} s8, s4": {1: 31, 0xFFFF0000: 16, 0: WORD, WORD: WORD},
    }
    for text, pairs in cases.items():
        for source, expected in pairs.items():
            assert scc(arch, text, {"s4": source})[0] == expected, (text, source)
    state = execute(arch, [f"{add} s4, 0xfffe", "s_mulk_i32 s5, 0xffff"], {"s4": 5, "s5": 3})
    assert (scalar(state, "s4"), scalar(state, "s5")) == (3, -3 & WORD)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_selects_read_the_result_of_comparisons(arch):
    for text, flag in {
        "s_cmp_lt_i32 s4, s5": 1,
        "s_cmp_lt_u32 s4, s5": 0,
        "s_cmp_ge_u32 s4, s5": 1,
        "s_cmp_lg_u32 s4, s5": 1,
        "s_cmp_eq_u64 s[4:5], s[4:5]": 1,
    }.items():
        state = execute(arch, [text, "s_cselect_b32 s6, 11, 22"], {"s4": WORD, "s5": 1})
        assert scalar(state, "s6") == (11 if flag else 22), text


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_exec_is_saved_and_changed(arch):
    count = lanes(arch)
    full = (1 << count) - 1
    pair, width, name = ("s[4:5]", 64, "exec") if arch in CDNA else ("s4", 32, "exec_lo")
    mask = 0x0F0F0F0F0F0F0F0F & full
    for operation, expected in {
        "and": mask & 0xFFFF,
        "or": mask | 0xFFFF,
        "xor": mask ^ 0xFFFF,
        ("andn2" if arch in CDNA else "and_not1"): mask & ~0xFFFF,
    }.items():
        saved = "s[6:7]" if arch in CDNA else "s6"
        text = f"s_{operation}_saveexec_b{width} {saved}, {pair}"
        state = execute(arch, text, {pair: mask}, active=0xFFFF)
        assert scalar(state, saved) == 0xFFFF and scalar(state, name) == expected, text
        assert np.array_equal(state.x[0], [bool(expected >> lane & 1) for lane in range(count)])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_loops_and_branches_are_followed(arch):
    """Ten iterations of a loop, and then an unconditional branch."""
    add = "s_add_co_i32" if arch == "gfx1201" else "s_add_i32"
    lines = [
        "s_mov_b32 s4, 0",
        "loop:",
        f"{add} s4, s4, 1",
        "s_cmp_lt_i32 s4, 10",
        "s_cbranch_scc1 loop",
        "s_branch end",
        "s_mov_b32 s4, 99",
        "end:",
        "s_nop 0",
    ]
    assert scalar(execute(arch, lines), "s4") == 10


@pytest.mark.parametrize("arch", ["gfx1150", "gfx1201"])
def test_float_instructions_equal_their_formulas(arch):
    def bits(x: float) -> int:
        return int(np.float32(x).view(np.uint32))

    registers = {"s4": bits(1.5), "s5": bits(-2.0), "s8": bits(1.0)}
    cases = {
        "s_add_f32 s8, s4, s5": -0.5,
        "s_sub_f32 s8, s4, s5": 3.5,
        "s_mul_f32 s8, s4, s5": -3.0,
        "s_fmac_f32 s8, s4, s5": -2.0,
        "s_fmaak_f32 s8, s4, s5, 0x40000000": -1.0,
        "s_trunc_f32 s8, s4": 1.0,
        "s_cvt_f32_i32 s8, -7": -7.0,
    }
    if arch == "gfx1201":
        cases |= {
            "v_s_exp_f32 s8, s5": 0.25,
            "v_s_rcp_f32 s8, s5": -0.5,
            "v_s_rsq_f32 s8, 4.0": 0.5,
            "v_s_sqrt_f32 s8, 4.0": 2.0,
            "v_s_log_f32 s8, 4.0": 2.0,
        }
    for text, expected in cases.items():
        assert scalar(execute(arch, text, registers), "s8") == bits(expected), text
    assert scalar(execute(arch, "s_cvt_u32_f32 s8, s4", registers), "s8") == 1


@pytest.mark.parametrize("text", ["s_add_f32 s8, s4, s4", "s_cvt_f32_i32 s8, s4", "s_cmp_lt_f32 s4, s4"])
def test_gfx11_0_has_no_scalar_floats(text):
    with pytest.raises(UnknownInstruction):
        execute("gfx1100", text, {"s4": 0})
