"""LDS, a workgroup's shared memory: its loads and stores, and the lane permutations that use its hardware."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from .compiling import Compiling, Step
from .errors import OutOfBounds
from .lanes import swizzle_source
from .memory import UNITS, check_single_value, expand, unit_of
from .operands import vector_reader
from .races import Access, check_interval
from .state import State
from .vector_memory import extended, gathered, spread
from .waits import Ticket, issue

u32, i64 = np.uint32, np.int64

# name -> (bytes, signed, the half of the register that is accessed, or None). With None, a load writes the whole
# register, and a store reads the low bytes.
_KINDS: dict[str, tuple[int, bool, int | None]] = {
    "b8": (1, False, None),
    "u8": (1, False, None),
    "i8": (1, True, None),
    "b16": (2, False, None),
    "u16": (2, False, None),
    "i16": (2, True, None),
    "b32": (4, False, None),
    "b64": (8, False, None),
    "b96": (12, False, None),
    "b128": (16, False, None),
    "u16_d16": (2, False, 0),
    "u16_d16_hi": (2, False, 1),
    "u8_d16": (1, False, 0),
    "u8_d16_hi": (1, False, 1),
    "b16_d16_hi": (2, False, 1),
    "b8_d16_hi": (1, False, 1),
}
_ACCESS = re.compile(r"ds_(read|load|write|store)(2|_2addr)?(st64|_stride64)?_(\w+)")


class Lds:
    """The LDS of all workgroups that run at the same time, in consecutive memory. It is initialised with garbage."""

    def __init__(self, groups: int, size: int, garbage: np.random.Generator) -> None:
        self.size = size
        self.stride = (size + 15) // 16 * 16
        octets = garbage.integers(0, 256, max(self.stride, 16), np.uint8)
        whole = np.tile(octets.view(np.complex128), groups)
        self.units = {unit: whole.view(dtype) for unit, dtype in UNITS.items()}
        self.accesses: list[Access] = []
        self.carried: list[Access] = []
        self.epoch = 0

    def places(self, state: State, address: np.ndarray, offset: int, size: int) -> np.ndarray:
        """The byte indices [n] of the active lanes in the memory of all workgroups. Raises `OutOfBounds`."""
        address = np.broadcast_to(address, state.x.shape)
        lanes = address.astype(i64) + offset
        bad = lanes + size > self.size
        if not state.full:
            bad = bad & state.x
        if bad.any():
            wave, lane = np.argwhere(bad)[0]
            raise OutOfBounds(
                f"lane {lane} of wave {state.waves[wave]}: {size} bytes at LDS byte {lanes[wave, lane]} of {self.size}"
            )
        lanes = lanes + state.lds_base[:, None]
        return lanes.reshape(-1) if state.full else lanes[state.x]

    def load(self, state: State, places: np.ndarray, size: int, index: int) -> tuple[np.ndarray, Access | None]:
        if not places.size:
            return np.zeros((0, max(1, size // 4)), u32), None
        unit = unit_of(places, size)
        spots = expand(places // unit, size // unit)
        data = self.units[unit][spots]
        access = self._record(state, places // unit, unit, size, index, writes=False)
        if size < 4:
            narrow = data.view(np.uint8 if size == 1 else np.uint16).astype(u32)
            return narrow.reshape(-1, 1), access
        return data.view(u32), access

    def store(self, state: State, places: np.ndarray, data: np.ndarray, index: int) -> Access | None:
        if not places.size:
            return None
        size = data.shape[1]
        unit = unit_of(places, size)
        spots = expand(places // unit, size // unit)
        values = np.ascontiguousarray(data).view(UNITS[unit])
        self.units[unit][spots] = values
        check_single_value(self.units[unit], spots, values)
        access = self._record(state, places // unit, unit, size, index, writes=True)
        access.values = values
        return access

    def _record(self, state: State, places: np.ndarray, unit: int, size: int, index: int, *, writes: bool) -> Access:
        lanes = True if state.full else state.x
        owner = (state.waves, lanes, False, state.lanes)
        access = Access(index, writes, unit, size // unit, places, owner, self.epoch)
        self.accesses.append(access)
        # An access after the signal of a split barrier belongs to the next interval too.
        if state.signalled:
            self.carried.append(access)
        return access

    def end_interval(self, in_flight: Sequence[Access], texts: Sequence[str]) -> None:
        """Check the accesses since the last barrier. Raises `Race`. in_flight: those that have not completed."""
        if self.accesses:
            check_interval(self.accesses, len(self.units[1]), texts, "the LDS of all workgroups")
        self.accesses = [*self.carried, *(access for access in in_flight if access.index >= 0)]
        self.carried = []
        self.epoch += 1


def compile_lds(c: Compiling) -> Step | None:
    if c.base == "ds_swizzle_b32":
        return _swizzle(c)
    if c.base in ("ds_bpermute_b32", "ds_permute_b32"):
        return _permute(c, backward=c.base == "ds_bpermute_b32")
    if match := re.fullmatch(r"ds_read_b64_tr_b(16|8)", c.base):
        return _transposed(c, int(match[1])) if c.target.name == "gfx950" else None
    match = _ACCESS.fullmatch(c.base)
    if not match or match[4] not in _KINDS:
        return None
    size, signed, half = _KINDS[match[4]]
    if match[2]:
        unit = size * (64 if match[3] else 1)
        offsets = [c.take("offset0", 0) * unit, c.take("offset1", 0) * unit]
    elif match[3]:
        return None
    else:
        offsets = [c.take("offset", 0)]
    if match[1] in ("read", "load"):
        return _load(c, offsets, size, signed, half)
    return _store(c, offsets, size, half)


def _load(c: Compiling, offsets: list[int], size: int, signed: bool, half: int | None) -> Step:
    target, machine, index, counter = c.operands[0], c.machine, c.index, c.target.counters["lds"]
    address = vector_reader(c.operands[1], "u")
    count = max(1, size // 4)
    registers = frozenset(range(target.register, target.register + count * len(offsets)))

    def step(state: State) -> None:
        start = address(state)
        result, accesses = [], []
        for part, offset in enumerate(offsets):
            words, access = machine.lds.load(state, machine.lds.places(state, start, offset, size), size, index)
            words = extended(words, size, signed)
            for i, value in enumerate(spread(words, state)):
                value = value if half is None else value.astype(np.uint16)
                result.append((target.register + part * count + i, value))
            if access:
                accesses.append(access)
        lanes = True if state.full else state.x
        issue(state, Ticket(counter, "lds", index, registers, result, lanes, half, tuple(accesses)))

    return step


def _store(c: Compiling, offsets: list[int], size: int, half: int | None) -> Step:
    machine, index, counter = c.machine, c.index, c.target.counters["lds"]
    address = vector_reader(c.operands[0], "u")
    data = c.operands[1 : 1 + len(offsets)]

    def step(state: State) -> None:
        start = address(state)
        accesses = []
        for operand, offset in zip(data, offsets, strict=True):
            octets = gathered(state, operand, size, True if state.full else state.x, high=bool(half))
            access = machine.lds.store(state, machine.lds.places(state, start, offset, size), octets, index)
            if access:
                accesses.append(access)
        issue(state, Ticket(counter, "lds", index, frozenset(), [], True, accesses=tuple(accesses)))

    return step


def _move(c: Compiling, value: np.ndarray, state: State) -> None:
    """Write the result of an instruction that uses the LDS hardware but not its memory. The instruction
    increments the counter of LDS accesses."""
    register = c.operands[0].register
    lanes: Any = True if state.full else state.x
    counter = c.target.counters["lds"]
    issue(state, Ticket(counter, "lds", c.index, frozenset({register}), [(register, value)], lanes))


def _swizzle(c: Compiling) -> Step:
    source, places = c.operands[1].register, swizzle_source(c)

    def step(state: State) -> None:
        _move(c, np.where(state.x[:, places], state.v[source][:, places], u32(0)), state)

    return step


def _permute(c: Compiling, *, backward: bool) -> Step:
    """ds_bpermute: every lane reads from the lane at its index. ds_permute: every lane writes to the lane at its
    index."""
    offset, mask = u32(c.take("offset", 0)), u32(c.target.lanes - 1)
    address, source = vector_reader(c.operands[1], "u"), c.operands[2].register

    def step(state: State) -> None:
        places = ((address(state) + offset) >> u32(2) & mask).astype(i64)
        if backward:
            active = np.take_along_axis(state.x, places, 1)
            value = np.where(active, np.take_along_axis(state.v[source], places, 1), u32(0))
        else:
            value = np.zeros_like(state.v[source])
            waves = np.broadcast_to(np.arange(state.count)[:, None], places.shape)
            value[waves[state.x], places[state.x]] = state.v[source][state.x]
        _move(c, value, state)

    return step


def _transposed(c: Compiling, bits: int) -> Step:
    """Transposing load: each group of 16 lanes reads rows of 16 elements, 8 bytes per lane; lane i gets column i."""
    target, machine, index, counter = c.operands[0], c.machine, c.index, c.target.counters["lds"]
    address, offset = vector_reader(c.operands[1], "u"), c.take("offset", 0)
    registers = frozenset({target.register, target.register + 1})
    dtype, rows = (np.uint16, 4) if bits == 16 else (np.uint8, 8)

    def step(state: State) -> None:
        if not state.full:
            raise c.refuse("inactive lanes are not implemented")
        words, access = machine.lds.load(state, machine.lds.places(state, address(state), offset, 8), 8, index)
        elements = np.ascontiguousarray(words).view(dtype).reshape(-1, rows, 16)
        columns = np.ascontiguousarray(elements.transpose(0, 2, 1)).view(u32).reshape(state.count, state.lanes, 2)
        result = [(target.register + i, np.ascontiguousarray(columns[:, :, i])) for i in range(2)]
        issue(state, Ticket(counter, "lds", index, registers, result, True, accesses=(access,)))

    return step
