"""A barrier with stores to LDS in flight is an error in the program, whether or not a launch causes a race."""

from __future__ import annotations

import pytest

from tests.amdgcn import barriers, one
from tests.amdgcn.driver import Code
from tests.amdgcn.machine import Race

STORE = {"gfx942": "ds_write_b32 v1, v2", "gfx1100": "ds_store_b32 v1, v2", "gfx1201": "ds_store_b32 v1, v2"}
WAIT = {"gfx942": "s_waitcnt lgkmcnt(0)", "gfx1100": "s_waitcnt lgkmcnt(0)", "gfx1201": "s_wait_dscnt 0x0"}
OTHER = {"gfx942": "s_waitcnt vmcnt(0)", "gfx1100": "s_waitcnt vmcnt(0)", "gfx1201": "s_wait_loadcnt 0x0"}
BARRIER = {
    "gfx942": ["s_barrier"],
    "gfx1100": ["s_barrier"],
    "gfx1201": ["s_barrier_signal -1", "s_barrier_wait -1"],
}
every_architecture = pytest.mark.parametrize("arch", STORE)


def unwaited_stores(arch, *lines):
    return list(barriers.without_wait(one.program(arch, list(lines))))


@every_architecture
def test_stores_must_complete_before_a_barrier(arch):
    store, wait, other, barrier = STORE[arch], WAIT[arch], OTHER[arch], BARRIER[arch]
    assert unwaited_stores(arch, store, wait, *barrier) == []
    assert unwaited_stores(arch, *barrier, store) == []
    assert unwaited_stores(arch, store, *barrier) == [(1, 0)]
    assert unwaited_stores(arch, store, other, *barrier) == [(2, 0)]
    assert unwaited_stores(arch, store, wait, store, *barrier, wait, *barrier)[0] == (3, 2)


@every_architecture
def test_every_path_is_followed(arch):
    """As in a fault on gfx1100, the barrier at the start of a loop is reached again after an iteration's stores."""
    store, wait, barrier = STORE[arch], WAIT[arch], BARRIER[arch]
    loop = [wait, "again:", *barrier, store, "s_cbranch_scc1 again", wait, *barrier]
    end = len(barrier)
    assert unwaited_stores(arch, *loop) == [(1, end + 1)]
    # Insert a wait before the branch.
    loop.insert(-len(barrier) - 2, wait)
    assert unwaited_stores(arch, *loop) == []
    skipped = [store, "s_cbranch_scc1 over", wait, "over:", *barrier]
    assert unwaited_stores(arch, *skipped) == [(3, 0)]


def test_a_launch_refuses_such_a_program():
    lines = [STORE["gfx1100"], *BARRIER["gfx1100"]]
    with pytest.raises(Race, match="'ds_store_b32 v1, v2' at 0 of k may be in flight at 's_barrier' at 1"):
        Code("k", one.assembly(lines), b"", "gfx1100").check_text()
    lines.insert(1, WAIT["gfx1100"])
    Code("k", one.assembly(lines), b"", "gfx1100").check_text()
