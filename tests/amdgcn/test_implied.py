"""A wait has no effect if none of its operations can be in flight, or if another wait completes them early enough."""

from __future__ import annotations

import pytest

from tests.amdgcn import implied, one

LOAD = "global_load_dword v4, v1, s[4:5]"
OTHER = "global_load_dword v8, v1, s[4:5]"
WAIT = "s_waitcnt vmcnt(0)"
USE = "v_mov_b32_e32 v2, v4"
IDLE = "v_mov_b32_e32 v6, v7"


def reason(*lines, at):
    return implied.implied(one.program("gfx942", list(lines)), at)


def test_a_wait_is_implied_if_another_wait_completes_its_operations_early_enough():
    words = "completes the same operations"
    assert words in reason(LOAD, WAIT, IDLE, WAIT, USE, at=1)
    assert words in reason(LOAD, OTHER, "s_waitcnt vmcnt(1)", "s_waitcnt vmcnt(1)", USE, at=2)
    newer = "global_load_dword v9, v1, s[4:5]"
    assert words in reason(LOAD, OTHER, "s_waitcnt vmcnt(1)", newer, "s_waitcnt vmcnt(2)", USE, at=2)
    assert words in reason(LOAD, "s_waitcnt vmcnt(0) lgkmcnt(0)", IDLE, WAIT, USE, at=1)


@pytest.mark.parametrize(
    "between",
    [
        [USE, WAIT],
        # Without the first wait, the load may overwrite this result.
        ["v_mov_b32_e32 v4, 0", WAIT],
        ["s_barrier", WAIT],
        ["s_cbranch_scc0 end", WAIT],
        ["s_waitcnt vmcnt(1)"],
        ["s_waitcnt lgkmcnt(0)"],
        [OTHER, "s_waitcnt vmcnt(2)"],
        [IDLE],
    ],
    ids=" ".join,
)
def test_a_required_wait_is_not_implied(between):
    assert reason(LOAD, WAIT, *between, USE, "end:", "s_nop 0", at=1) is None


def test_scalar_loads_arrive_in_any_order():
    loads = ["s_load_dword s8, s[0:1], 0x0", "s_load_dword s9, s[0:1], 0x4"]
    use = "s_mov_b32 s2, s8"
    assert reason(*loads, "s_waitcnt lgkmcnt(0)", "s_waitcnt lgkmcnt(0)", use, at=2)
    assert reason(*loads, "s_waitcnt lgkmcnt(1)", "s_waitcnt lgkmcnt(1)", use, at=2) is None
    read = "ds_read_b32 v4, v1"
    mixed = [read, "s_waitcnt lgkmcnt(0)", loads[0], "s_waitcnt lgkmcnt(1)", USE]
    assert reason(*mixed, at=1) is None


def test_a_wait_is_implied_if_nothing_is_in_flight_on_any_path():
    words = "no operation that it waits for"
    assert words in reason(IDLE, WAIT, at=1)
    assert words in reason(LOAD, WAIT, "s_barrier", WAIT, at=3)
    # A load from LDS increments another counter.
    assert words in reason("ds_read_b32 v4, v1", WAIT, USE, at=1)
    loop = ["loop:", WAIT, IDLE, LOAD, "s_cbranch_scc0 loop"]
    # The load of the previous iteration is in flight.
    assert reason(*loop, at=0) is None
    assert reason("s_cbranch_scc0 past", LOAD, "past:", WAIT, "s_barrier", USE, at=2) is None
    # vmcnt(1) leaves one load in flight.
    assert reason(LOAD, "s_waitcnt vmcnt(1)", WAIT, USE, at=2) is None


def test_counters_of_gfx12_are_separate():
    lines = [
        "ds_load_b32 v4, v1",
        "global_load_b32 v8, v1, s[4:5]",
        "s_wait_loadcnt_dscnt 0x0",
        "s_wait_dscnt 0x0",
        USE,
    ]
    assert implied.implied(one.program("gfx1201", lines), 2) is None
    lines.insert(4, "s_wait_loadcnt 0x0")
    assert "completes the same operations" in implied.implied(one.program("gfx1201", lines), 2)
