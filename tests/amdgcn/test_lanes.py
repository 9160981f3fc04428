"""Instructions that move data between lanes are compared with the lane numbers in AMD's ISA documents."""

from __future__ import annotations

import numpy as np
import pytest

from .machine import MachineError
from .one import ARCHITECTURES, CDNA, RDNA, execute, lanes, scalar, vector


def row_control(control: str, n: int, lane: int) -> int | None:
    """The source lane of a DPP control that CDNA and RDNA both have, or None if there is no such lane."""
    row, place = lane // 16 * 16, lane % 16
    if control == "row_shl":
        return lane + n if place + n < 16 else None
    if control == "row_shr":
        return lane - n if place >= n else None
    if control == "row_ror":
        return row + (place - n) % 16
    raise AssertionError(control)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("control", ["row_shl", "row_shr", "row_ror"])
@pytest.mark.parametrize("n", [1, 4, 8, 15])
def test_shifts_within_a_row(arch, control, n):
    source = 100 + np.arange(lanes(arch), dtype=np.uint32)
    for bound, missing in (("", 7), (" bound_ctrl:1", 0)):
        text = f"v_mov_b32_dpp v2, v1 {control}:{n} row_mask:0xf bank_mask:0xf{bound}"
        state = execute(arch, text, {"v1": source, "v2": 7})
        places = [row_control(control, n, lane) for lane in range(lanes(arch))]
        assert list(vector(state, "v2")) == [missing if place is None else 100 + place for place in places], text


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_dpp_patterns(arch):
    source = np.arange(lanes(arch), dtype=np.uint32)
    cases = {
        "quad_perm:[3,1,0,2]": lambda lane: lane // 4 * 4 + (3, 1, 0, 2)[lane % 4],
        "row_mirror": lambda lane: lane // 16 * 16 + 15 - lane % 16,
        "row_half_mirror": lambda lane: lane // 8 * 8 + 7 - lane % 8,
    }
    if arch in RDNA:
        cases["row_share:5"] = lambda lane: lane // 16 * 16 + 5
        cases["row_xmask:6"] = lambda lane: lane ^ 6
    else:
        cases["row_newbcast:5"] = lambda lane: lane // 16 * 16 + 5
        cases["wave_rol:1"] = lambda lane: (lane + 1) % 64
        cases["wave_ror:1"] = lambda lane: (lane - 1) % 64
    for control, formula in cases.items():
        state = execute(arch, f"v_mov_b32_dpp v2, v1 {control} row_mask:0xf bank_mask:0xf", {"v1": source})
        assert list(vector(state, "v2")) == [formula(lane) for lane in range(lanes(arch))], control


@pytest.mark.parametrize("arch", CDNA)
def test_broadcasts_to_the_next_rows(arch):
    """row_bcast:15 copies the last lane of a row to the next row; row_bcast:31 copies lane 31 to rows 2 and 3."""
    source = 100 + np.arange(64, dtype=np.uint32)
    state = execute(arch, "v_mov_b32_dpp v2, v1 row_bcast:15 row_mask:0xa bank_mask:0xf", {"v1": source, "v2": 7})
    assert list(vector(state, "v2")) == [7] * 16 + [115] * 16 + [7] * 16 + [147] * 16
    state = execute(arch, "v_mov_b32_dpp v2, v1 row_bcast:31 row_mask:0xc bank_mask:0xf", {"v1": source, "v2": 7})
    assert list(vector(state, "v2")) == [7] * 32 + [131] * 32


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_masks_of_rows_and_banks(arch):
    source = np.arange(lanes(arch), dtype=np.uint32)
    text = "v_mov_b32_dpp v2, v1 quad_perm:[0,1,2,3] row_mask:0x2 bank_mask:0x5"
    state = execute(arch, text, {"v1": source, "v2": 99})
    expected = [lane if lane // 16 == 1 and lane // 4 % 4 in (0, 2) else 99 for lane in range(lanes(arch))]
    assert list(vector(state, "v2")) == expected


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_inactive_sources(arch):
    """An inactive lane is not a valid source: the destination keeps its value, or becomes 0 with bound_ctrl.

    With fi on RDNA, inactive lanes are valid sources.
    """
    source = 100 + np.arange(lanes(arch), dtype=np.uint32)
    active = (1 << lanes(arch)) - 1 & ~0b10
    for bound, expected in (("", 7), (" bound_ctrl:1", 0)):
        text = f"v_mov_b32_dpp v2, v1 row_shl:1 row_mask:0xf bank_mask:0xf{bound}"
        state = execute(arch, text, {"v1": source, "v2": 7}, active=active)
        assert list(vector(state, "v2")[:3]) == [expected, 7, 103]
    if arch in RDNA:
        text = "v_mov_b32_dpp v2, v1 row_shl:1 row_mask:0xf bank_mask:0xf fi:1"
        assert list(vector(execute(arch, text, {"v1": source, "v2": 7}, active=active), "v2")[:2]) == [101, 7]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_arithmetic_with_a_moved_source(arch):
    source = np.arange(lanes(arch), dtype=np.float32)
    text = "v_add_f32_dpp v2, v1, v1 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf"
    state = execute(arch, text, {"v1": source, "v2": 0})
    assert list(vector(state, "v2", np.float32)) == [lane + (lane ^ 1) for lane in range(lanes(arch))]


@pytest.mark.parametrize("arch", RDNA)
def test_permlane(arch):
    source = 100 + np.arange(32, dtype=np.uint32)
    select = 0xFEDCBA9876543210
    reverse = 0x0123456789ABCDEF
    for low_high, order in ((select, lambda x: x), (reverse, lambda x: 15 - x)):
        registers = {"v1": source, "s2": low_high & 0xFFFFFFFF, "s3": low_high >> 32}
        state = execute(arch, "v_permlane16_b32 v2, v1, s2, s3", registers)
        assert list(vector(state, "v2")) == [100 + lane // 16 * 16 + order(lane % 16) for lane in range(32)]
        state = execute(arch, "v_permlanex16_b32 v2, v1, s2, s3", registers)
        assert list(vector(state, "v2")) == [100 + (1 - lane // 16) * 16 + order(lane % 16) for lane in range(32)]
    state = execute(arch, "v_permlanex16_b32 v2, v1, -1, -1 op_sel:[1,0]", {"v1": source})
    assert list(vector(state, "v2")) == [131] * 16 + [115] * 16


def test_swaps_of_rows():
    first, second = np.arange(64, dtype=np.uint32), 100 + np.arange(64, dtype=np.uint32)
    state = execute("gfx950", "v_permlane32_swap_b32_e32 v1, v2", {"v1": first, "v2": second})
    assert list(vector(state, "v1")) == [*range(32), *range(100, 132)]
    assert list(vector(state, "v2")) == [*range(32, 64), *range(132, 164)]
    state = execute("gfx950", "v_permlane16_swap_b32_e32 v1, v2", {"v1": first, "v2": second})
    assert list(vector(state, "v1")) == [*range(16), *range(100, 116), *range(32, 48), *range(132, 148)]
    assert list(vector(state, "v2")) == [*range(16, 32), *range(116, 132), *range(48, 64), *range(148, 164)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_lanes_to_scalars_and_back(arch):
    source = 100 + np.arange(lanes(arch), dtype=np.uint32)
    state = execute(arch, "v_readfirstlane_b32 s4, v1", {"v1": source}, active=0b11000)
    assert scalar(state, "s4") == 103
    state = execute(arch, "v_readlane_b32 s4, v1, 31", {"v1": source}, active=1)
    assert scalar(state, "s4") == 131
    state = execute(arch, "v_writelane_b32 v1, s4, 9", {"v1": source, "s4": 5}, active=1)
    assert vector(state, "v1")[9] == 5 and vector(state, "v1")[0] == 100


WAIT = {name: "s_wait_dscnt 0x0" if name == "gfx1201" else "s_waitcnt lgkmcnt(0)" for name in ARCHITECTURES}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_swizzles(arch):
    """Offset bits 4:0 keep, 9:5 set and 14:10 flip bits of the lane index within 32; bit 15 selects a quad pattern."""
    source = np.arange(lanes(arch), dtype=np.uint32)
    and_mask, or_mask, xor_mask = 0b11101, 0b00010, 0b10001
    masks = xor_mask << 10 | or_mask << 5 | and_mask
    cases = {
        "swizzle(SWAP,16)": lambda lane: lane ^ 16,
        "swizzle(REVERSE,8)": lambda lane: lane // 8 * 8 + 7 - lane % 8,
        "swizzle(BROADCAST,8,3)": lambda lane: lane // 8 * 8 + 3,
        "swizzle(QUAD_PERM,3,1,0,2)": lambda lane: lane // 4 * 4 + (3, 1, 0, 2)[lane % 4],
        str(masks): lambda lane: lane & 32 | (lane & 31 & and_mask | or_mask) ^ xor_mask,
        str(0x8000 | 3 | 1 << 2 | 0 << 4 | 2 << 6): lambda lane: lane // 4 * 4 + (3, 1, 0, 2)[lane % 4],
    }
    for offset, formula in cases.items():
        state = execute(arch, [f"ds_swizzle_b32 v2, v1 offset:{offset}", WAIT[arch]], {"v1": source})
        assert list(vector(state, "v2")) == [formula(lane) for lane in range(lanes(arch))], offset


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_permutations_through_lds(arch):
    count = lanes(arch)
    source, order = 100 + np.arange(count, dtype=np.uint32), np.random.default_rng(0).permutation(count)
    registers = {"v1": 4 * order, "v2": source}
    state = execute(arch, ["ds_bpermute_b32 v3, v1, v2", WAIT[arch]], registers)
    assert list(vector(state, "v3")) == [100 + place for place in order]
    state = execute(arch, ["ds_permute_b32 v3, v1, v2", WAIT[arch]], registers)
    assert [vector(state, "v3")[place] for place in order] == list(source)
    state = execute(arch, ["ds_bpermute_b32 v3, v1, v2", WAIT[arch]], {"v1": 4, "v2": source}, active=1)
    assert vector(state, "v3")[0] == 0, "an inactive lane is read as 0"


def test_transposing_load():
    """In every group of 16 lanes, lane i receives column i of the four rows of 16 elements at the lanes' addresses."""
    lines = ["ds_write_b64 v1, v[2:3]", "ds_read_b64_tr_b16 v[4:5], v1", "s_waitcnt lgkmcnt(0)"]
    lane = np.arange(64, dtype=np.uint32)
    # element e of lane n is 4 n + e, in row 4 n // 16 % 4 and column (4 n + e) % 16 of its block of 16 lanes
    registers = {"v1": 8 * lane, "v2": 4 * lane | (4 * lane + 1) << 16, "v3": 4 * lane + 2 | (4 * lane + 3) << 16}
    state = execute("gfx950", lines, registers, lds=512)
    for lane in range(64):
        block, column = lane // 16, lane % 16
        words = vector(state, "v4")[lane], vector(state, "v5")[lane]
        actual = [int(word) >> shift & 0xFFFF for word in words for shift in (0, 16)]
        assert actual == [64 * block + 16 * row + column for row in range(4)]


def test_swaps_with_inactive_lanes_are_refused():
    with pytest.raises(MachineError, match="inactive"):
        execute("gfx950", "v_permlane32_swap_b32_e32 v1, v2", {"v1": 0, "v2": 0}, active=1)
