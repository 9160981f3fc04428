"""Every kind of planted fault changes one instruction."""

from __future__ import annotations

import random

import pytest

from tests.amdgcn import mutate


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("a wait left out", "s_waitcnt vmcnt(0)", "s_nop 0"),
        ("a wait left out", "s_wait_loadcnt 0x0", "s_nop 0"),
        ("a barrier left out", "s_barrier", "s_nop 0"),
        ("a barrier left out", "s_barrier_signal -1", None),
        (
            "other lanes",
            "v_add_f32_dpp v4, v4, v4 row_shr:8 row_mask:0xf bank_mask:0xf",
            "v_add_f32_dpp v4, v4, v4 row_shr:9 row_mask:0xf bank_mask:0xf",
        ),
        ("another mask", "v_cndmask_b32_e32 v11, v19, v28, vcc", "v_cndmask_b32_e32 v11, v28, v19, vcc"),
        ("another mask", "v_cmp_gt_u32_e64 s[2:3], 4, v0", "v_cmp_ge_u32_e64 s[2:3], 4, v0"),
        ("another destination", "v_add_u32_e32 v3, v1, v2", "v_add_u32_e32 v4, v1, v2"),
        ("another operation", "v_add_f32_e32 v3, v1, v2", "v_sub_f32_e32 v3, v1, v2"),
        ("another operation", "s_endpgm", None),
    ],
)
def test_every_kind_makes_the_expected_change(kind, before, after):
    assert mutate.KINDS[kind](before, random.Random(0)) == after


@pytest.mark.parametrize("kind", ["another address", "another operand", "another constant"])
def test_a_random_change_keeps_the_operation(kind):
    before = {
        "another address": "ds_read_b32 v0, v1 offset:16",
        "another operand": "v_fma_f32 v0, v1, v2, v3",
        "another constant": "v_lshlrev_b32_e32 v1, 2, v0",
    }[kind]
    after = mutate.KINDS[kind](before, random.Random(0))
    assert after is not None and after != before and after.split()[0] == before.split()[0]


def test_the_same_seed_draws_the_same_faults():
    text = ["s_endpgm", "v_add_f32_e32 v3, v1, v2", "v_mul_f32_e32 v3, v1, v2"]
    draws = [next(mutate.drawn(text, [0, 1, 2], random.Random(seed))) for seed in (1, 1, 2, 3, 4)]
    assert draws[0] == draws[1] and len(set(draws)) > 1
    assert all(fault.index in (1, 2) for fault in draws)
