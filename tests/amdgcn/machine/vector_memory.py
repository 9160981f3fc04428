"""Vector memory: global_load and global_store, buffer_load and buffer_store."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from .compiling import Compiling, Step
from .errors import Descriptor
from .operands import Operand, scalar_reader, vector_reader
from .state import State
from .waits import Ticket, issue

u32, u64, i64 = np.uint32, np.uint64, np.int64

# name -> (bytes, signed)
SIZES = {
    "dword": (4, False),
    "dwordx2": (8, False),
    "dwordx3": (12, False),
    "dwordx4": (16, False),
    "b32": (4, False),
    "b64": (8, False),
    "b96": (12, False),
    "b128": (16, False),
    "ubyte": (1, False),
    "u8": (1, False),
    "byte": (1, False),
    "b8": (1, False),
    "sbyte": (1, True),
    "i8": (1, True),
    "ushort": (2, False),
    "u16": (2, False),
    "short": (2, False),
    "b16": (2, False),
    "sshort": (2, True),
    "i16": (2, True),
}
_D16 = {"short_d16": 2, "short_d16_hi": 2, "d16_b16": 2, "d16_hi_b16": 2, "byte_d16_hi": 1, "short_d16_hi_": 2}
_D16_LOADS = {"ubyte_d16": 1, "ubyte_d16_hi": 1, "d16_u8": 1, "d16_hi_u8": 1}
HINTS = ("glc", "slc", "dlc", "sc0", "sc1", "nt", "th", "scope")
_NO_EFFECT = re.compile(r"buffer_(gl[01]_inv|wbl2|inv|wbinvl1|wbinvl1_vol)|global_(inv|wb|wbinv)")


@dataclass(frozen=True)
class Contract:
    """The compiler's rules for buffers, checked at every access. The hardware drops accesses beyond a buffer's end, so
    a wrong limit or a wrong address could go unnoticed.

    records: the limit of every buffer. flags: the fourth word of the descriptor. masked: the offset of a masked lane.
    """

    records: int
    flags: int
    masked: int

    def check(self, words: np.ndarray, offsets: np.ndarray | None, dropped: np.ndarray) -> None:
        """Raise `Descriptor` for a violation.

        words: [4, waves]. offsets: the lanes' offsets, without the instruction's offset, or None for a uniform offset.
        dropped: the lanes beyond the end.
        """
        if (words[2] != self.records).any():
            raise Descriptor(f"expected a limit of {self.records:#x}, got {int(words[2].max()):#x}")
        if (words[3] != self.flags).any():
            raise Descriptor(f"expected flags {self.flags:#x}, got {int(words[3].max()):#x}")
        if dropped.any():
            if offsets is None:
                raise Descriptor("a uniform offset is beyond the buffer's end")
            stray = np.broadcast_to(offsets, dropped.shape)[dropped]
            stray = stray[stray != self.masked]
            if stray.size:
                raise Descriptor(f"offset {int(stray[0]):#x} of an unmasked lane is beyond the buffer's end")


def extended(words: np.ndarray, size: int, signed: bool) -> np.ndarray:
    """Sign-extend the zero-extended data of a narrow load if it is signed."""
    if not signed:
        return words
    return words.astype(np.int8 if size == 1 else np.int16).astype(np.int32).view(u32)


def spread(words: np.ndarray, state: State) -> list[np.ndarray]:
    """Expand [n, words] of the active lanes to one [waves, lanes] array per register. The other lanes are zero."""
    shape = (state.count, state.lanes)
    if state.full:
        return [np.ascontiguousarray(words[:, i]).reshape(shape) for i in range(words.shape[1])]
    arrays = []
    for i in range(words.shape[1]):
        array = np.zeros(shape, words.dtype)
        array[state.x] = words[:, i]
        arrays.append(array)
    return arrays


def gathered(state: State, operand: Operand, size: int, lanes: Any, *, high: bool) -> np.ndarray:
    """Return a copy of the data that these lanes store: uint8 [n, size]. high: read the upper half of the register."""
    registers = max(1, size // 4)
    rows = state.v[operand.register : operand.register + registers]
    words = rows.reshape(registers, -1).T if lanes is True else rows[:, lanes].T
    if high:
        words = words >> u32(16)
    return np.array(words, order="C").view(np.uint8)[:, :size]


def compile_vector_memory(c: Compiling) -> Step | None:
    if _NO_EFFECT.fullmatch(c.base):
        for hint in HINTS:
            c.take(hint)
        return lambda state: None
    match = re.fullmatch(r"(global|buffer)_(load|store)_(\w+)", c.base)
    if not match:
        return None
    form, load, kind = match[1], match[2] == "load", match[3]
    if kind not in SIZES and kind not in _D16 and kind not in _D16_LOADS:
        return None
    if c.has("lds"):
        raise c.refuse("loads into LDS are not implemented")
    for hint in HINTS:
        c.take(hint)
    address = _global_addresses(c, load) if form == "global" else _buffer_addresses(c)
    if load:
        return _load(c, kind, address, c.operands[0])
    data = c.operands[1] if form == "global" else c.operands[0]
    return _store(c, kind, address, data)


def _global_addresses(c: Compiling, load: bool):
    """Return a function that returns the addresses [n] of the active lanes and the mask of these lanes (True: all)."""
    vector = c.operands[1] if load else c.operands[0]
    base = c.operands[2]
    offset = u64(c.take("offset", 0) & 2**64 - 1)
    if base.kind == "none":
        pair = vector_reader(vector, "U")

        def wide(state: State, size: int):
            addresses = pair(state) + offset
            return (addresses.reshape(-1), True) if state.full else (addresses[state.x], state.x)

        return wide
    index, start = vector_reader(vector, "u"), scalar_reader(base, "U")

    def saddr(state: State, size: int):
        addresses = index(state).astype(u64) + (start(state) + offset)[:, None]
        return (addresses.reshape(-1), True) if state.full else (addresses[state.x], state.x)

    return saddr


def _buffer_addresses(c: Compiling):
    """Like `_global_addresses`, for a raw buffer (no stride). The mask omits lanes whose offset is beyond the limit."""
    _, vector, resource, scalar = c.operands
    offset = c.take("offset", 0)
    if c.take("idxen") or resource.count != 4:
        raise c.refuse("only raw buffers are implemented")
    per_lane = vector_reader(vector, "u") if c.take("offen") else None
    extra, first, machine = scalar_reader(scalar, "u"), resource.register, c.machine

    def addresses(state: State, size: int):
        words = state.s[first : first + 4]
        if (words[1] >> u32(16) & u32(0x3FFF)).any():
            raise c.refuse("a buffer with a stride is not implemented")
        base = words[0] | (words[1] & u32(0xFFFF)).astype(u64) << u64(32)
        lane_offsets = np.full((state.count, 1), offset, i64)
        if per_lane:
            lane_offsets = lane_offsets + per_lane(state)
        lane_offsets = np.broadcast_to(lane_offsets, (state.count, state.lanes))
        scalar_offset = extra(state).astype(i64)[:, None]
        lanes = state.x & (lane_offsets + scalar_offset + size <= words[2].astype(i64)[:, None])
        if contract := machine.memory.contract:
            contract.check(words, per_lane(state) if per_lane else None, state.x & ~lanes)
        return ((base[:, None] + (lane_offsets + scalar_offset).view(u64))[lanes], lanes)

    return addresses


def _load(c: Compiling, kind: str, addresses, target: Operand) -> Step:
    counter, machine, index = c.target.counters["load"], c.machine, c.index
    half = None
    if kind in _D16 or kind in _D16_LOADS:
        size, signed, half = (_D16.get(kind) or _D16_LOADS[kind]), False, int("hi" in kind)
    else:
        size, signed = SIZES[kind]
    count = max(1, size // 4)
    registers = frozenset(range(target.register, target.register + count))

    def step(state: State) -> None:
        lane_addresses, lanes = addresses(state, size)
        words, accesses = machine.memory.load(lane_addresses, size, state, index, lanes=lanes)
        machine.memory.requested += lane_addresses.size * size
        words = extended(words, size, signed)
        values = _spread(words, state, lanes)
        if half is not None:
            values = [value.astype(np.uint16) for value in values]
        active = True if state.full else state.x
        result = [(target.register + i, value) for i, value in enumerate(values)]
        issue(state, Ticket(counter, "vmem", index, registers, result, active, half, accesses))

    return step


def _spread(words: np.ndarray, state: State, lanes) -> list[np.ndarray]:
    if lanes is True or lanes is state.x:
        return spread(words, state)
    arrays = []
    for i in range(words.shape[1]):
        # Lanes beyond a buffer's end read zero.
        array = np.zeros((state.count, state.lanes), words.dtype)
        array[lanes] = words[:, i]
        arrays.append(array)
    return arrays


def _store(c: Compiling, kind: str, addresses, data: Operand) -> Step:
    counter, machine, index = c.target.counters["store"], c.machine, c.index
    high = "hi" in kind
    size = _D16[kind] if kind in _D16 else SIZES[kind][0]

    def step(state: State) -> None:
        lane_addresses, lanes = addresses(state, size)
        octets = gathered(state, data, size, lanes, high=high)
        accesses = machine.memory.store(lane_addresses, octets, state, index, lanes=lanes)
        machine.memory.requested += lane_addresses.size * size
        issue(state, Ticket(counter, "vmem", index, frozenset(), [], True, accesses=accesses))

    return step
