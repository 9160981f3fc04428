"""Figures that are computed from a kernel's assembly."""

from __future__ import annotations

import pytest

from tests.amdgcn import figures
from tests.amdgcn.device import GPUS


def test_loads_are_in_flight_until_they_are_waited_for():
    text = [
        "global_load_dwordx4 v[0:3], v[8:9], off",
        "buffer_load_ushort v4, v5, s[0:3], 0 offen",
        "s_waitcnt vmcnt(1)",
        "global_store_dword v[8:9], v0, off",
        "global_load_dword v6, v[8:9], off",
        "s_waitcnt vmcnt(0)",
        "global_load_dword v6, v[8:9], off",
    ]
    assert figures.in_flight(text, "gfx942") == 64 * (16 + 2)
    assert figures.in_flight(text[:3] + text[4:], "gfx942") == 64 * (16 + 2)


def test_gfx12_counts_loads_separately():
    text = ["global_load_b128 v[0:3], v[8:9], off", "s_wait_loadcnt 0x0", "global_load_b64 v[0:1], v[8:9], off"]
    assert figures.in_flight(text, "gfx1201") == 32 * 16
    both = [text[0], "s_wait_loadcnt_dscnt 0x100", text[2]]
    assert figures.in_flight(both, "gfx1201") == 32 * (16 + 8)


def test_bytes_in_flight_follow_littles_law():
    assert figures.MEMORIES["gfx942"].needed() == pytest.approx(13947, abs=1)
    assert {arch: memory.units for arch, memory in figures.MEMORIES.items()} == {
        arch: gpu.units for arch, gpu in GPUS.items()
    }
