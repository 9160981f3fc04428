"""Loads, stores, scratch, waits, bounds, guard zones, races, barriers and uninitialised registers."""

from __future__ import annotations

import numpy as np
import pytest

from .machine import Descriptor, EarlyAccess, Memory, OutOfBounds, Race, launch
from .machine.vector_memory import Contract
from .one import ARCHITECTURES, CDNA, execute, lanes, program, scalar, vector

LOADED = {name: "s_wait_loadcnt 0x0" if name == "gfx1201" else "s_waitcnt vmcnt(0)" for name in ARCHITECTURES}
LDS = {name: "s_wait_dscnt 0x0" if name == "gfx1201" else "s_waitcnt lgkmcnt(0)" for name in ARCHITECTURES}
SCALAR = {name: "s_wait_kmcnt 0x0" if name == "gfx1201" else "s_waitcnt lgkmcnt(0)" for name in ARCHITECTURES}
BARRIER = {
    name: ["s_barrier_signal -1", "s_barrier_wait -1"] if name == "gfx1201" else ["s_barrier"] for name in ARCHITECTURES
}


def word(arch: str, count: int = 1) -> str:
    if arch in CDNA:
        return "dword" if count == 1 else f"dwordx{count}"
    return f"b{32 * count}"


def read(arch: str) -> str:
    return "ds_read" if arch in CDNA else "ds_load"


def write(arch: str) -> str:
    return "ds_write" if arch in CDNA else "ds_store"


def buffer(size: int, *, writable: bool = True) -> tuple[Memory, np.ndarray, dict[str, int]]:
    """Return (memory with a buffer, the buffer's bytes, registers with its address in s[4:5])."""
    data = np.arange(size, dtype=np.uint32).astype(np.uint8)
    memory = Memory()
    return memory, data, {"s[4:5]": memory.place(data, writable=writable)}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_loads_and_stores_of_words(arch, count):
    memory, data, registers = buffer(4096)
    lane = np.arange(lanes(arch), dtype=np.uint32)
    last = f":{3 + count}" if count > 1 else ""
    value = f"v[4{last}]" if count > 1 else "v4"
    lines = [
        f"global_load_{word(arch, count)} {value}, v1, s[4:5] offset:16",
        LOADED[arch],
        f"global_store_{word(arch, count)} v1, {value}, s[4:5] offset:2048",
    ]
    before = data.copy()
    state = execute(arch, lines, {**registers, "v1": 4 * count * lane}, memory=memory)
    for i in range(count):
        expected = before[16:].view(np.uint32)[i::count][: lanes(arch)]
        np.testing.assert_array_equal(vector(state, f"v{4 + i}"), expected)
    moved = 4 * count * lanes(arch)
    np.testing.assert_array_equal(data[2048 : 2048 + moved], before[16 : 16 + moved])
    written = memory.buffers[0].written
    assert written[2048 : 2048 + moved].all() and written.sum() == moved


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_narrow_loads(arch):
    memory, data, registers = buffer(256)
    data[7] = 0x85
    memory.buffers[0].bytes[7] = 0x85
    names = {"ubyte": "u8", "sbyte": "i8", "ushort": "u16", "sshort": "i16"}
    expected = {"ubyte": 0x85, "sbyte": 0xFFFFFF85, "ushort": 0x8506, "sshort": 0xFFFF8506}
    for old, new in names.items():
        offset = 7 if "byte" in old else 6
        line = f"global_load_{old if arch in CDNA else new} v4, v1, s[4:5] offset:{offset}"
        state = execute(arch, [line, LOADED[arch]], {**registers, "v1": 0}, memory=memory)
        assert int(vector(state, "v4")[0]) == expected[old], old
    line = f"global_load_{'short_d16_hi' if arch in CDNA else 'd16_hi_b16'} v4, v1, s[4:5]"
    state = execute(arch, [line, LOADED[arch]], {**registers, "v1": 0, "v4": 0xAAAABBBB}, memory=memory)
    assert int(vector(state, "v4")[0]) == 0x0100BBBB
    first = line.replace("_d16_hi", "_d16")
    state = execute(arch, [first, LOADED[arch], line, LOADED[arch]], {**registers, "v1": 0}, memory=memory)
    assert int(vector(state, "v4")[0]) == 0x01000100
    # The second load preserves the other half, which is still in flight.
    with pytest.raises(EarlyAccess):
        execute(arch, [first, line, LOADED[arch]], {**registers, "v1": 0}, memory=memory)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_lanes_beyond_the_limit_read_zero_and_do_not_write(arch):
    """The limit is the third word of the buffer's descriptor."""
    memory, data, registers = buffer(256)
    address = registers["s[4:5]"]
    lane = np.arange(lanes(arch), dtype=np.uint32)
    resource = {"s8": address & 0xFFFFFFFF, "s9": address >> 32, "s10": 20, "s11": 0x27000}
    offset = {**resource, "v1": 4 * lane, "v5": 7}
    zero = "null" if arch == "gfx1201" else "0"
    load = f"buffer_load_{word(arch)} v4, v1, s[8:11], {zero} offen"
    state = execute(arch, [load, LOADED[arch]], offset, memory=memory)
    np.testing.assert_array_equal(vector(state, "v4")[:5], data[:20].view(np.uint32))
    assert (vector(state, "v4")[5:] == 0).all()
    execute(arch, f"buffer_store_{word(arch)} v5, v1, s[8:11], {zero} offen", offset, memory=memory)
    assert list(data[:24].view(np.uint32)) == [7] * 5 + [0x17161514]


@pytest.mark.parametrize(
    ("change", "offsets", "words"),
    [
        ({}, [0, 0x80000000], None),
        ({"s10": 0x7FFFFFFC}, [0], "got 0x7ffffffc"),
        ({"s11": 0x26000}, [0], "got 0x26000"),
        ({}, [0x7FFFFFFC], "0x7ffffffc of an unmasked lane"),
        ({}, [0x80000080], "0x80000080 of an unmasked lane"),
    ],
)
def test_buffers_are_checked_against_the_compilers_rules(change, offsets, words):
    """Errors that hardware may ignore silently are reported: a wrong limit, wrong flags, and a wrong offset."""
    arch = "gfx942"
    memory, _, registers = buffer(256)
    memory.contract = Contract(0x7FFFFFFE, 0x27000, 0x80000000)
    address = registers["s[4:5]"]
    resource = {"s8": address & 0xFFFFFFFF, "s9": address >> 32, "s10": 0x7FFFFFFE, "s11": 0x27000, **change}
    lane_offsets = np.resize(np.array(offsets, np.uint32), lanes(arch))
    call = lambda: execute(  # noqa: E731
        arch,
        ["buffer_load_dword v4, v1, s[8:11], 0 offen", LOADED[arch]],
        {**resource, "v1": lane_offsets},
        memory=memory,
    )
    if words is None:
        assert vector(call(), "v4")[1] == 0
    else:
        with pytest.raises(Descriptor, match=words):
            call()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_hidden_bytes_are_out_of_bounds(arch):
    """Hidden bytes are the bytes of a storage that belong to no tensor of the launch."""
    memory, _, registers = buffer(256)
    hidden = np.zeros(256, bool)
    hidden[40:44] = True
    memory.buffers[0].hide(hidden)
    line = f"global_load_{word(arch)} v4, v1, s[4:5]"
    execute(arch, [line, LOADED[arch]], {**registers, "v1": 36}, memory=memory)
    for offset in (37, 40, 43):
        with pytest.raises(OutOfBounds, match="belong to no tensor"):
            execute(arch, [line, LOADED[arch]], {**registers, "v1": offset}, memory=memory)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_scalar_loads(arch):
    memory, data, registers = buffer(256, writable=False)
    line = f"s_load_{word(arch, 4)} s[8:11], s[4:5], 0x10"
    state = execute(arch, [line, SCALAR[arch]], registers, memory=memory)
    assert [scalar(state, f"s{i}") for i in range(8, 12)] == list(data[16:32].view(np.uint32))
    with pytest.raises(EarlyAccess, match="s9 awaits"):
        execute(arch, [line, "s_mov_b32 s2, s9"], registers, memory=memory)
    # Scalar loads complete in any order, so only a wait for all of them is sufficient.
    with pytest.raises(EarlyAccess):
        wait = "s_wait_kmcnt 0x1" if arch == "gfx1201" else "s_waitcnt lgkmcnt(1)"
        execute(arch, [line, line.replace("8:11", "12:15"), wait, "s_mov_b32 s2, s9"], registers, memory=memory)
    # The hardware ignores the lower bits.
    for offset in ("0x11", "0x12"):
        with pytest.raises(OutOfBounds, match="multiple of 4"):
            execute(arch, [line.replace("0x10", offset)], registers, memory=memory)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_early_accesses_are_errors(arch):
    memory, _, registers = buffer(256)
    registers |= {"v1": 0}
    load = f"global_load_{word(arch)} v4, v1, s[4:5]"
    for use in ("v_mov_b32_e32 v2, v4", "v_mov_b32_e32 v4, 0"):
        with pytest.raises(EarlyAccess, match="v4 awaits the result of 'global_load"):
            execute(arch, [load, use], registers, memory=memory)
        with pytest.raises(EarlyAccess):
            execute(arch, [load, LDS[arch], use], registers, memory=memory)
        execute(arch, [load, LOADED[arch], use], registers, memory=memory)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_loads_complete_in_order(arch):
    memory, data, registers = buffer(256)
    registers |= {"v1": 0}
    one_left = "s_wait_loadcnt 0x1" if arch == "gfx1201" else "s_waitcnt vmcnt(1)"
    loads = [f"global_load_{word(arch)} v{4 + i}, v1, s[4:5] offset:{4 * i}" for i in range(2)]
    state = execute(arch, [*loads, one_left, "v_mov_b32_e32 v2, v4"], registers, memory=memory)
    assert vector(state, "v2")[0] == data[:4].view(np.uint32)[0]
    with pytest.raises(EarlyAccess, match="v5 awaits"):
        execute(arch, [*loads, one_left, "v_mov_b32_e32 v2, v5"], registers, memory=memory)


def test_stores_count_as_loads_only_on_cdna():
    memory, _, registers = buffer(256)
    registers |= {"v1": 0, "v5": 0}
    store, use = "global_store_{0} v1, v5, s[4:5] offset:64", "v_mov_b32_e32 v2, v4"
    load, wait = "global_load_{0} v4, v1, s[4:5]", "s_waitcnt vmcnt(1)"
    execute("gfx942", [load.format("dword"), store.format("dword"), wait, use], registers, memory=memory)
    with pytest.raises(EarlyAccess):
        execute("gfx1100", [load.format("b32"), store.format("b32"), wait, use], registers, memory=memory)


def test_a_counter_at_its_maximum_makes_the_wave_wait():
    memory, _, registers = buffer(1024)
    loads = [f"global_load_dword v{10 + i}, v1, s[4:5]" for i in range(64)]
    registers |= {"v1": 0}
    execute("gfx942", [*loads, "v_mov_b32_e32 v2, v10"], registers, memory=memory)
    with pytest.raises(EarlyAccess):
        execute("gfx942", [*loads, "v_mov_b32_e32 v2, v11"], registers, memory=memory)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("offset", "lane"), [(-4, 0), (4 - 4 * 64, 63), (1 << 20, 5)])
def test_every_lane_address_is_checked(arch, offset, lane):
    """A wrong address of a single lane is reported: before the start, across the end, or far away."""
    size = 4 * lanes(arch)
    memory, _, registers = buffer(size)
    memory.place(np.zeros(1 << 16, np.uint8))
    places = 4 * np.arange(lanes(arch), dtype=np.int64)
    lane %= lanes(arch)
    places[lane] = offset if offset != 4 - 4 * 64 else size - 2
    low = (registers["s[4:5]"] + places).astype(np.uint64)
    halves = {"v2": (low & np.uint64(0xFFFFFFFF)).astype(np.uint32), "v3": (low >> np.uint64(32)).astype(np.uint32)}
    for line in (f"global_load_{word(arch)} v4, v[2:3], off", f"global_store_{word(arch)} v[2:3], v4, off"):
        with pytest.raises(OutOfBounds, match="nearest buffer"):
            execute(arch, line, halves, memory=memory)
        execute(arch, line, halves, memory=memory, active=(1 << lanes(arch)) - 1 & ~(1 << lane))


def test_buffers_need_guard_zones_and_stores_to_read_only_ones_are_errors():
    memory = Memory()
    memory.add(1 << 20, np.zeros(100, np.uint8))
    with pytest.raises(ValueError, match="bytes between"):
        memory.add((1 << 20) + 200, np.zeros(100, np.uint8))
    memory, _, registers = buffer(256, writable=False)
    with pytest.raises(OutOfBounds, match="read-only"):
        execute("gfx942", "global_store_dword v1, v1, s[4:5]", {**registers, "v1": 0}, memory=memory)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_lds_of_several_sizes(arch):
    lane = np.arange(lanes(arch), dtype=np.uint32)
    values = {f"v{4 + i}": (i + 1) * 0x01020304 + lane for i in range(4)}
    for count, suffix in ((1, "b32"), (2, "b64"), (4, "b128")):
        value = f"v[4:{3 + count}]" if count > 1 else "v4"
        back = f"v[8:{7 + count}]" if count > 1 else "v8"
        lines = [f"{write(arch)}_{suffix} v1, {value} offset:64", f"{read(arch)}_{suffix} {back}, v1 offset:64"]
        state = execute(arch, [*lines, LDS[arch]], {"v1": 4 * count * lane, **values}, lds=2048)
        for i in range(count):
            np.testing.assert_array_equal(vector(state, f"v{8 + i}"), values[f"v{4 + i}"])
    two = (
        ("write2", "read2", "write2st64", "read2st64")
        if arch in CDNA
        else ("store_2addr", "load_2addr", "store_2addr_stride64", "load_2addr_stride64")
    )
    for stored, loaded in (two[:2], two[2:]):
        lines = [
            f"ds_{stored}_b32 v1, v4, v5 offset1:64",
            f"ds_{loaded}_b32 v[8:9], v1 offset0:64 offset1:0",
            LDS[arch],
        ]
        state = execute(arch, lines, {"v1": 4 * lane, **values}, lds=32768)
        np.testing.assert_array_equal(vector(state, "v8"), values["v5"])
        np.testing.assert_array_equal(vector(state, "v9"), values["v4"])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_lds_bounds(arch):
    for line in (f"{read(arch)}_b64 v[4:5], v1", f"{write(arch)}_b64 v1, v[4:5]"):
        execute(arch, line, {"v1": 56, "v4": 0, "v5": 0}, lds=64)
        with pytest.raises(OutOfBounds, match="of 64"):
            execute(arch, line, {"v1": 60, "v4": 0, "v5": 0}, lds=64)


def exchange(arch: str, *, barrier: bool = True, wait: bool = True) -> list[str]:
    """Every lane writes its element (v3) to LDS at v1, and reads the element at v2."""
    between = BARRIER[arch] if barrier else []
    store = [f"{write(arch)}_b32 v1, v3", *([LDS[arch]] if wait else []), *between]
    return [*store, f"{read(arch)}_b32 v4, v2", LDS[arch]]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_races_in_lds(arch):
    count = lanes(arch)
    place = np.arange(2 * count, dtype=np.uint32).reshape(2, count)
    registers = {"v1": 4 * place, "v2": 4 * place[::-1], "v3": 100 + place}
    for seed in range(6):
        state = execute(arch, exchange(arch), registers, lds=8 * count, waves=2, seed=seed)
        np.testing.assert_array_equal(state.v[4], 100 + place[::-1])
        with pytest.raises(Race, match="no barrier between them"):
            execute(arch, exchange(arch, barrier=False), registers, lds=8 * count, waves=2, seed=seed)
        # The store is still in flight when the other wave passes the barrier.
        with pytest.raises(Race):
            execute(arch, exchange(arch, wait=False), registers, lds=8 * count, waves=2, seed=seed)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_equal_stores_are_not_a_race(arch):
    store = f"{write(arch)}_b32 v1, v3"
    execute(arch, store, {"v1": 0, "v3": 5}, lds=64, waves=2)
    with pytest.raises(Race):
        execute(arch, store, {"v1": 0, "v3": np.array([[5], [6]], np.uint32)}, lds=64, waves=2)
    with pytest.raises(Race, match="two lanes"):
        execute(arch, store, {"v1": 0, "v3": np.arange(lanes(arch), dtype=np.uint32)}, lds=64)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_races_between_workgroups(arch):
    """Both workgroups store their index to the first word of the buffer, or to different words."""
    x = "ttmp9" if arch == "gfx1201" else "s2"
    base = [f"s_load_{word(arch, 2)} s[4:5], s[0:1], 0x0", SCALAR[arch], f"v_mov_b32_e32 v3, {x}"]
    lines = [*base, "v_mov_b32_e32 v1, 0", f"global_store_{word(arch)} v1, v3, s[4:5]"]
    own = [*base, "v_lshlrev_b32_e32 v1, 2, v3", f"global_store_{word(arch)} v1, v3, s[4:5]"]
    for code, races in ((lines, True), (own, False)):
        data = np.full(64, 0xEE, np.uint8)
        memory = Memory()
        kernarg = memory.place(data).to_bytes(8, "little")
        if races:
            with pytest.raises(Race):
                launch(program(arch, code), (2, 1, 1), kernarg, memory, waves=1)
            continue
        report = launch(program(arch, code), (2, 1, 1), kernarg, memory, waves=1)
        assert list(data.view(np.uint32)[:3]) == [0, 1, 0xEEEEEEEE]
        assert next(iter(report.written.values())).sum() == 8
        assert report.bytes_requested == 2 * 4 * lanes(arch) and report.bytes_needed == 8
        assert report.reached == set(range(6)) and report.instructions == 12


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_registers_and_lds_start_as_garbage(arch):
    first, second = (execute(arch, "v_mov_b32_e32 v2, v5", seed=seed) for seed in (1, 2))
    assert np.isnan(vector(first, "v2", np.float32)).all()
    assert not np.array_equal(vector(first, "v2"), vector(second, "v2"))
    lines = [f"{read(arch)}_b32 v4, v1", LDS[arch]]
    actual = [int(vector(execute(arch, lines, {"v1": 0}, lds=64, seed=seed), "v4")[0]) for seed in (1, 2)]
    assert actual[0] != actual[1]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_diverged_waves_join_again(arch):
    """Only even waves take the branch; all waves add 1 after it."""
    add = "v_add_u32_e32" if arch in CDNA else "v_add_nc_u32_e32"
    compare = "v_readfirstlane_b32 s4, v1"
    lines = [compare, "s_cmp_eq_u32 s4, 0", "s_cbranch_scc1 after", f"{add} v2, 10, v2", "after:", f"{add} v2, 1, v2"]
    numbers = np.array([[0], [1], [0], [1]], np.uint32)
    data = np.zeros(4 * lanes(arch) * 4, np.uint8)
    memory = Memory()
    base = memory.place(data)
    place = 4 * np.arange(4 * lanes(arch), dtype=np.uint32).reshape(4, -1)
    store = f"global_store_{word(arch)} v3, v2, s[6:7]"
    execute(arch, [*lines, store], {"v1": numbers, "v2": 0, "v3": place, "s[6:7]": base}, memory=memory, waves=4)
    assert [int(row[0]) for row in data.view(np.uint32).reshape(4, -1)] == [1, 11, 1, 11]


# On gfx90a, the compiler uses buffer instructions for scratch.
@pytest.mark.parametrize("arch", [name for name in ARCHITECTURES if name != "gfx90a"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_scratch_is_private_to_a_lane(arch, count):
    values, others = (f"v[{first}:{first + count - 1}]" if count > 1 else f"v{first}" for first in (4, 8))
    lane = np.arange(lanes(arch), dtype=np.uint32)
    written = {f"v{4 + i}": np.stack([1000 * i + lane, 1000 * i + lane + 500]) for i in range(count)}
    lines = [f"scratch_store_{word(arch, count)} off, {values}, off offset:12"]
    lines += [f"scratch_load_{word(arch, count)} {others}, off, off offset:12", LOADED[arch]]
    state = execute(arch, lines, written, waves=2)
    for i in range(count):
        np.testing.assert_array_equal(state.v[8 + i], written[f"v{4 + i}"])


@pytest.mark.parametrize("arch", [name for name in ARCHITECTURES if name != "gfx90a"])
def test_scratch_of_inactive_lanes_is_kept_and_starts_as_garbage(arch):
    lines = [
        f"scratch_store_{word(arch)} off, v4, off",
        "s_mov_b32 exec_lo, 1",
        f"scratch_store_{word(arch)} off, v5, off",
    ]
    lines += ["s_mov_b32 exec_lo, 3", f"scratch_load_{word(arch)} v6, off, off"]
    lines += [f"scratch_load_{word(arch)} v7, off, off offset:4", LOADED[arch]]
    state = execute(arch, lines, {"v4": 1, "v5": 2})
    assert vector(state, "v6")[:2].tolist() == [2, 1]
    assert np.isnan(vector(state, "v7")[:2].view(np.float32)).all()


@pytest.mark.parametrize("arch", [name for name in ARCHITECTURES if name != "gfx90a"])
def test_scratch_accesses_out_of_bounds_or_too_early_are_errors(arch):
    with pytest.raises(OutOfBounds, match="of 32 bytes per lane"):
        execute(arch, [f"scratch_store_{word(arch)} off, v4, off offset:32"], {"v4": 1})
    with pytest.raises(EarlyAccess):
        execute(arch, [f"scratch_load_{word(arch)} v4, off, off", "v_mov_b32_e32 v5, v4"], {"v4": 1})
