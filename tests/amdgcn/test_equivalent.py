"""A fault is proven to have no effect only if it has none."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from tests.amdgcn import equivalent, flow, one

ARCH = "gfx942"
ADDRESS = 0x7000_0000_0000
LINES = [
    "s_load_dwordx2 s[4:5], s[0:1], 0x0",
    "s_load_dword s6, s[0:1], 0x8",
    "v_lshlrev_b32_e32 v1, 2, v0",
    "v_and_b32_e32 v4, 63, v0",  # index 3
    "v_mov_b32_e32 v3, 9",  # index 4
    "v_mov_b32_e32 v3, 1",
    "v_and_b32_e32 v5, 7, v0",  # index 6
    "v_cmp_gt_u32_e32 vcc, {bound}, v0",
    "s_nop 1",
    "v_cndmask_b32_e32 v2, 0, v5, vcc",
    "v_add_u32_e32 v2, v2, v3",  # index 10
    "v_add_u32_e32 v2, v2, v4",
    "global_store_dword v1, v2, s[4:5]",
    "s_endpgm",
]


def proof(index, after, bound="8"):
    waits = [LINES[0], LINES[1], "s_waitcnt lgkmcnt(0)", *LINES[2:]]
    index += index >= 2
    whole = one.program(ARCH, [line.format(bound=bound) for line in waits])
    data = np.zeros(256, np.uint8)
    kernarg = struct.pack("<Qi", ADDRESS, 8)
    kept = equivalent.RecordedLaunch(
        kernarg, ((ADDRESS, data, None, torch.int32),), None, {"grid": (1, 1, 1), "waves": 1, "lds": 0}
    )
    return equivalent.proof(whole, whole.with_instruction(index, after), index, [kept])


@pytest.mark.parametrize(
    ("index", "after", "words"),
    [
        (3, "v_and_b32_e32 v4, 0x7f, v0", "computes the same"),
        # No other instruction names v77.
        (4, "v_mov_b32_e32 v77, 9", "overwritten before"),
        (4, "v_mov_b32_e32 v3, 8", "overwritten before"),
        (6, "v_and_b32_e32 v5, 15, v0", "idle"),
        (3, "v_and_b32_e32 v4, 31, v0", None),
        (6, "v_and_b32_e32 v5, 3, v0", None),
        (10, "v_sub_u32_e32 v2, v2, v3", None),
    ],
)
def test_only_faults_without_effect_have_a_proof(index, after, words):
    result = proof(index, after)
    assert result is None if words is None else words in result


@pytest.mark.parametrize(("index", "after"), [(6, "v_and_b32_e32 v5, 15, v0"), (1, "s_load_dword s6, s[0:1], 0xc")])
def test_what_depends_on_an_argument_is_not_proven(index, after):
    """With a larger argument, the lanes that differ would not be idle. There is no proof for a fault in a load."""
    assert proof(index, after, bound="s6") is None


def test_registers_and_flags_that_are_read_are_live():
    lines = ["s_cmp_lg_u32 s4, 0", "s_mul_i32 s5, s4, s4", "s_cselect_b32 s6, s4, s5", "s_mov_b32 s6, 0"]
    program = one.program(ARCH, lines)
    # s_mul does not write SCC.
    assert not flow.dead(program, 0, {flow.SCC})
    assert flow.dead(program, 2, {1000 + 6})
    partial = ["v_mov_b32_e32 v1, 1", "s_mov_b64 exec, 1", "v_mov_b32_e32 v1, 2", "s_mov_b64 exec, -1"]
    used = one.program(ARCH, [*partial, "v_mov_b32_e32 v2, v1"])
    # The inactive lanes keep the value.
    assert not flow.dead(used, 0, {1})
