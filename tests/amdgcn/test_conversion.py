"""All forms of the compiler's conversion to bfloat16 are recognised, and a wrong step is reported."""

from __future__ import annotations

import random

import pytest

from tests.amdgcn import mutate, sequences
from tests.amdgcn.one import program

PLAIN = [
    "v_bfe_u32 v2, v1, 16, 1",
    "v_add3_u32 v2, v1, v2, 0x7fff",
    "v_lshrrev_b32_e32 v2, 16, v2",
    "v_cmp_o_f32_e32 vcc_lo, v1, v1",
    "v_cndmask_b32_e32 v1, 0x7fff, v2, vcc_lo",
]
OLD = [
    "v_mov_b32_e32 v9, 1",
    "s_movk_i32 s3, 0x7fff",
    "v_and_b32_sdwa v2, v1, v9 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD",
    "v_add3_u32 v2, v1, v2, s3",
    "v_and_b32_e32 v2, 0xffff0000, v2",
    "v_mov_b32_e32 v4, 0x7fff0000",
    "v_cmp_o_f32_e64 s[0:1], v1, v1",
    "v_cndmask_b32_e64 v1, v4, v2, s[0:1]",
]


def wrong(arch, lines):
    return [index for index, _ in sequences.wrong(program(arch, lines))]


def test_the_sequence_is_recognised_in_all_forms_that_compilers_emit():
    assert wrong("gfx1100", PLAIN) == wrong("gfx942", OLD) == []
    shifts = ["v_lshrrev_b32_e32 v2, 16, v1", "v_and_b32_e32 v2, 1, v2", *PLAIN[1:]]
    assert wrong("gfx1100", shifts) == []
    twice = [PLAIN[0], "v_add_nc_u32_e32 v2, v1, v2", "v_add_nc_u32_e32 v2, 0x7fff, v2", *PLAIN[2:]]
    assert wrong("gfx1100", twice) == []
    swapped = [*PLAIN[:3], "v_cmp_u_f32_e32 vcc_lo, v1, v1", "v_cndmask_b32_e64 v1, v2, 0x7fff, vcc_lo"]
    assert wrong("gfx1100", swapped) == [] and wrong("gfx1100", [*swapped[:3], PLAIN[3], swapped[4]]) == [0]
    before_a_loop = [*OLD[:2], "loop:", OLD[0], *OLD[2:], "s_cbranch_scc0 loop"]
    assert wrong("gfx942", before_a_loop) == []
    # These lines are not recognisable as a conversion.
    assert wrong("gfx1100", ["v_cndmask_b32_e32 v1, 0x7fff, v2, vcc_lo"]) == []
    assert wrong("gfx1100", ["v_bfe_u32 v2, v1, 16, 2", "v_cndmask_b32_e32 v1, 3, v2, vcc_lo"]) == []


@pytest.mark.parametrize(("arch", "lines"), [("gfx1100", PLAIN), ("gfx942", OLD)], ids=["gfx1100", "gfx942"])
def test_every_fault_of_the_sequence_is_reported(arch, lines):
    rng, kinds = random.Random(3), set()
    for index, line in enumerate(lines):
        for name in ("another operand", "another destination", "another operation", "another constant"):
            for _ in range(8):
                after = mutate.KINDS[name](line, rng)
                # not an error: the result in another register, or without the mask, which a later instruction may apply
                free = line.startswith("v_cndmask") or "0xffff0000" in line
                if after in (None, line) or (name == "another destination" and free):
                    continue
                # with another constant, the sequence is not a conversion
                if line.startswith("v_mov_b32_e32 v4") and name == "another constant":
                    continue
                kinds.add(name)
                assert wrong(arch, [*lines[:index], after, *lines[index + 1 :]]), after
    assert len(kinds) >= 3
