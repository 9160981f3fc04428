"""Wait states that the compiler must insert for CDNA, with the numbers from AMD's ISA documents and LLVM."""

from __future__ import annotations

import pytest

from .machine import Hazard, Memory, launch
from .one import program

MATRIX = "v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], 0"
OLD_MATRIX = "v_mfma_f32_16x16x16f16 v[0:3], v[4:5], v[6:7], 0"

# architecture, first and second instruction, wait states that are required between them
CASES = [
    ("gfx942", MATRIX, "v_mov_b32_e32 v8, v3", 7),
    ("gfx942", MATRIX, "v_mov_b32_e32 v3, 0", 7),
    ("gfx942", MATRIX, "global_store_dword v[8:9], v0, off", 7),
    ("gfx942", MATRIX.replace("16x16x16", "32x32x8").replace("v[0:3]", "v[16:31]"), "v_mov_b32_e32 v8, v31", 11),
    ("gfx942", "v_mfma_f32_16x16x4_f32 v[0:3], v4, v6, 0", "v_mov_b32_e32 v8, v3", 10),
    ("gfx90a", OLD_MATRIX, "v_mov_b32_e32 v8, v3", 11),
    ("gfx90a", OLD_MATRIX.replace("16x16x16", "32x32x8").replace("v[0:3]", "v[16:31]"), "v_mov_b32_e32 v8, v31", 19),
    ("gfx942", "v_mov_b32_e32 v4, 0", MATRIX, 2),
    ("gfx942", "v_mov_b32_e32 v1, 0", "v_mov_b32_dpp v2, v1 row_shr:1 row_mask:0xf bank_mask:0xf", 2),
    ("gfx90a", "v_mov_b32_e32 v1, 0", "v_mov_b32_dpp v2, v1 row_shr:1 row_mask:0xf bank_mask:0xf", 2),
    ("gfx90a", "v_cmp_eq_u32_e32 vcc, v1, v2", "v_div_fmas_f32 v3, v4, v5, v6", 4),
    ("gfx90a", "v_readfirstlane_b32 s4, v1", "v_readlane_b32 s5, v2, s4", 4),
    ("gfx90a", "v_readfirstlane_b32 s4, v1", "global_load_dword v3, v4, s[4:5]", 5),
    ("gfx942", "v_cmp_eq_u32_e32 vcc, v1, v2", "v_cndmask_b32_e32 v3, v4, v5, vcc", 2),
    ("gfx942", "v_exp_f32_e32 v1, v2", "v_add_f32_e32 v3, v1, v1", 1),
    ("gfx942", "v_mov_b32_e32 v1, 0", "v_readfirstlane_b32 s4, v1", 1),
]


@pytest.mark.parametrize(("arch", "first", "second", "states"), CASES)
def test_wait_states(arch, first, second, states):
    exact = program(arch, [first, f"s_nop {states - 1}", second])
    assert not exact.hazards
    short = [f"s_nop {states - 2}"] if states > 1 else []
    assert program(arch, [first, *short, second]).hazards == ((0, 1 + len(short), 1),)
    # unrelated instructions count as wait states
    filler = ["s_mov_b32 s20, 0"] * states
    assert not program(arch, [first, *filler, second]).hazards
    assert program(arch, [first, *filler[1:], second]).hazards


def test_other_pairs_need_no_wait_states():
    for arch, first, second in (
        ("gfx90a", "v_cmp_eq_u32_e32 vcc, v1, v2", "v_cndmask_b32_e32 v3, v4, v5, vcc"),
        ("gfx942", MATRIX, "v_mov_b32_e32 v8, v4"),
        ("gfx942", MATRIX, "v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3]"),
        ("gfx942", "v_exp_f32_e32 v1, v2", "v_rcp_f32_e32 v3, v1"),
        ("gfx1100", "v_exp_f32_e32 v1, v2", "v_add_f32_e32 v3, v1, v1"),
    ):
        assert not program(arch, [first, second]).hazards


def test_a_launch_refuses_a_program_with_a_hazard():
    code = program("gfx942", ["v_mov_b32_e32 v1, 0", "v_readfirstlane_b32 s4, v1"])
    with pytest.raises(Hazard, match="too early: 1 more wait state needed"):
        launch(code, (1, 1, 1), b"", Memory(), waves=1)
