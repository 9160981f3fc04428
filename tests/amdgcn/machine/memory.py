"""Global memory: the buffers that were passed to a kernel, with guard zones between them.

Every address of every active lane must lie in a buffer, and only writable buffers can be written to. A launch records
the bytes that it read and wrote and, to detect races, which wave accessed them.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np

from .errors import OutOfBounds, Race
from .races import Access
from .state import State

# The smallest allowed distance between two buffers.
GUARD = 4096
# Distance between buffers at new addresses: larger than any 32-bit offset.
SPACING = 1 << 33
_FIRST = 0x7000_0000_0000

# Data is copied in the widest unit to which all addresses are aligned; complex128 is used as a 16-byte type.
UNITS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def unit_of(addresses: np.ndarray, size: int) -> int:
    """The widest unit in which `size` bytes at all of these addresses can be copied."""
    bits = int(np.bitwise_or.reduce(addresses, axis=None)) | size | 16
    return bits & -bits


def expand(index: np.ndarray, repeat: int) -> np.ndarray:
    """Expand each of the indices [n] to `repeat` consecutive ones: [n, repeat]."""
    return index[:, None] if repeat == 1 else index[:, None] + np.arange(repeat)


class Buffer:
    """One buffer: a copy of the caller's bytes with the same alignment, written back after the launch if writable."""

    def __init__(self, number: int, address: int, data: np.ndarray, writable: bool) -> None:
        self.number, self.address, self.writable = number, address, writable
        self.data, self.size = data, data.size
        self.start = address % 256
        self.length = self.start + self.size
        self.units = self._aligned((self.length + 15) & ~15)
        self.bytes[self.start : self.length] = data
        self.touched_units = self._aligned(self.units[1].size)
        self.written_units = self._aligned(self.units[1].size) if writable else {}
        self.accesses: list[Access] = []
        self.hidden_units: dict[int, np.ndarray] = {}

    def hide(self, hidden: np.ndarray) -> None:
        """Make accesses to the hidden bytes an error, like accesses beyond the end. hidden: bool [size]."""
        self.hidden_units = self._aligned(self.units[1].size)
        self.hidden_units[1][self.start : self.length] = hidden

    def check(self, unit: int, spots: np.ndarray, addresses: np.ndarray, size: int) -> None:
        """Raise `OutOfBounds` for a hidden byte."""
        if not self.hidden_units:
            return
        bad = np.flatnonzero((self.hidden_units[unit][spots] != 0).any(1))
        if bad.size:
            address = int(addresses[bad[0]])
            where = f"from byte {address - self.address} of a buffer of {self.size} bytes"
            raise OutOfBounds(
                f"{size} bytes at {address:#x}, {where}: some of them belong to no tensor that was passed"
            )

    @staticmethod
    def _aligned(size: int) -> dict[int, np.ndarray]:
        """A zeroed byte array and its views in every unit."""
        whole = np.zeros(max(size, 16) // 16, np.complex128)
        return {unit: whole.view(dtype) for unit, dtype in UNITS.items()}

    @property
    def bytes(self) -> np.ndarray:
        return self.units[1]

    @property
    def written(self) -> np.ndarray:
        """The bytes that any wave has written: bool [size]."""
        if not self.writable:
            return np.zeros(self.size, bool)
        return self.written_units[1][self.start : self.length] != 0

    @property
    def touched(self) -> int:
        """The number of bytes that were read or written."""
        return int(np.count_nonzero(self.touched_units[1][self.start : self.length]))


_MARK = {unit: np.full(16, 1, np.uint8).view(dtype)[0] for unit, dtype in UNITS.items()}


class Memory:
    """The buffers of one launch.

    requested: the number of bytes that the lanes of vector loads and stores requested. contract: the rules for buffer
    instructions, a `vector_memory.Contract`, or None.
    """

    def __init__(self, contract: Any = None) -> None:
        self.contract = contract
        self.buffers: list[Buffer] = []
        self._starts: list[int] = []
        self.requested = 0
        self.epoch = 0

    def add(self, address: int, data: np.ndarray, *, writable: bool = True) -> None:
        """Map a caller's bytes (uint8, one dimension) to an address of the simulated GPU."""
        if data.dtype != np.uint8 or data.ndim != 1:
            raise ValueError(f"expected uint8 [n], got {data.dtype} {list(data.shape)}")
        for buffer in self.buffers:
            if address < buffer.address + buffer.size + GUARD and buffer.address < address + data.size + GUARD:
                raise ValueError(f"less than {GUARD} bytes between the buffers at {buffer.address:#x} and {address:#x}")
        place = bisect_right(self._starts, address)
        self._starts.insert(place, address)
        self.buffers.insert(place, Buffer(len(self.buffers), address, data, writable))

    def place(self, data: np.ndarray, *, writable: bool = True, like: int = 0) -> int:
        """Map a caller's bytes to a new address, far from the other buffers.

        like: an address with the required alignment.
        """
        address = _FIRST + SPACING * len(self.buffers) + like % 256
        self.add(address, data, writable=writable)
        return address

    def write_back(self) -> None:
        """Copy the results to the caller's bytes."""
        for buffer in self.buffers:
            if buffer.writable:
                buffer.data[:] = buffer.bytes[buffer.start : buffer.length]

    def buffer_at(self, address: int) -> Buffer:
        return self.buffers[bisect_right(self._starts, address) - 1]

    def _place(self, addresses: np.ndarray, size: int) -> Buffer | None:
        """The buffer that contains all of these addresses, or None if there is no such buffer."""
        low, high = int(addresses.min()), int(addresses.max())
        place = bisect_right(self._starts, low) - 1
        if place >= 0:
            buffer = self.buffers[place]
            if high + size <= buffer.address + buffer.size:
                return buffer
        return None

    def _groups(self, addresses: np.ndarray, size: int) -> list[tuple[Buffer, np.ndarray]]:
        """Group the lanes by buffer. Raises `OutOfBounds` for a lane outside all buffers."""
        places = np.searchsorted(np.array(self._starts, np.uint64), addresses, side="right") - 1
        groups = []
        for place in np.unique(places):
            lanes = np.flatnonzero(places == place)
            buffer = self.buffers[place] if place >= 0 else None
            end = buffer.address + buffer.size - size if buffer else -1
            bad = [lane for lane in lanes if int(addresses[lane]) > end]
            if bad:
                raise OutOfBounds(self._describe(int(addresses[bad[0]]), size, int(bad[0]), len(bad)))
            groups.append((self.buffers[place], lanes))
        return groups

    def _describe(self, address: int, size: int, lane: int, count: int) -> str:
        def distance(buffer: Buffer) -> int:
            return max(buffer.address - address, address - buffer.address - buffer.size, 0)

        nearest = min(self.buffers, key=distance, default=None)
        where = "there is no buffer"
        if nearest:
            where = f"byte {address - nearest.address} of the nearest buffer, which has {nearest.size} bytes"
        return f"{size} bytes at {address:#x} (active lane {lane} of the batch, {count} such lanes): {where}"

    def load(
        self, addresses: np.ndarray, size: int, state: State, index: int, *, per_wave: bool = False, lanes: Any = None
    ) -> tuple[np.ndarray, tuple[Access, ...]]:
        """Read `size` bytes at [n] addresses. Returns (uint32 [n, max(1, size / 4)], one access per buffer).

        Narrower data is zero-extended.

        lanes: the mask [waves, lanes] of the lanes with these addresses, or True for all lanes. per_wave: there is
        one address per wave instead of one per lane.
        """
        if not addresses.size:
            return np.zeros((0, max(1, size // 4)), np.uint32), ()
        buffer = self._place(addresses, size)
        if buffer is None:
            words = np.empty((addresses.size, max(1, size // 4)), np.uint32)
            accesses = []
            for buffer, chosen in self._groups(addresses, size):
                owner = _wave_of(state, lanes, per_wave)[chosen]
                words[chosen], access = self._load(buffer, addresses[chosen], size, owner, index)
                accesses.append(access)
            return words, tuple(accesses)
        words, access = self._load(buffer, addresses, size, (state.waves, lanes, per_wave, state.lanes), index)
        return words, (access,)

    def _load(
        self, buffer: Buffer, addresses: np.ndarray, size: int, owner: Any, index: int
    ) -> tuple[np.ndarray, Access]:
        offsets = addresses - np.uint64(buffer.address - buffer.start)
        unit = unit_of(offsets, size)
        places = (offsets // np.uint64(unit)).astype(np.int64)
        spots = expand(places, size // unit)
        buffer.check(unit, spots, addresses, size)
        data = buffer.units[unit][spots]
        buffer.touched_units[unit][spots] = _MARK[unit]
        access = Access(index, False, unit, size // unit, places, owner, self.epoch)
        if buffer.writable:
            buffer.accesses.append(access)
        if size < 4:
            narrow = data.view(np.uint8 if size == 1 else np.uint16).astype(np.uint32)
            return narrow.reshape(-1, 1), access
        return data.view(np.uint32), access

    def store(
        self, addresses: np.ndarray, data: np.ndarray, state: State, index: int, *, lanes: Any = None
    ) -> tuple[Access, ...]:
        """Write [n, bytes] of uint8 at [n] addresses. Returns one access per buffer."""
        if not addresses.size:
            return ()
        size = data.shape[1]
        buffer = self._place(addresses, size)
        if buffer:
            return (self._store(buffer, addresses, data, (state.waves, lanes, False, state.lanes), index),)
        owner = _wave_of(state, lanes, False)
        return tuple(
            self._store(buffer, addresses[chosen], data[chosen], owner[chosen], index)
            for buffer, chosen in self._groups(addresses, size)
        )

    def _store(self, buffer: Buffer, addresses: np.ndarray, data: np.ndarray, owner: Any, index: int) -> Access:
        size = data.shape[1]
        if not buffer.writable:
            raise OutOfBounds(f"{size} bytes at {int(addresses[0]):#x}: that buffer is read-only")
        offsets = addresses - np.uint64(buffer.address - buffer.start)
        unit = unit_of(offsets, size)
        places = (offsets // np.uint64(unit)).astype(np.int64)
        spots = expand(places, size // unit)
        buffer.check(unit, spots, addresses, size)
        values = np.ascontiguousarray(data).view(UNITS[unit])
        buffer.units[unit][spots] = values
        check_single_value(buffer.units[unit], spots, values)
        buffer.touched_units[unit][spots] = _MARK[unit]
        buffer.written_units[unit][spots] = _MARK[unit]
        access = Access(index, True, unit, size // unit, places, owner, self.epoch, values=values)
        buffer.accesses.append(access)
        return access


def _wave_of(state: State, lanes: Any, per_wave: bool) -> np.ndarray:
    """The wave of each address."""
    if per_wave:
        return state.waves
    waves = np.repeat(state.waves, state.lanes)
    return waves if lanes is True else waves[lanes.reshape(-1)]


def check_single_value(memory: np.ndarray, spots: np.ndarray, values: np.ndarray) -> None:
    """Raise `Race` if two lanes of one store wrote different values to the same address."""
    stored = np.ascontiguousarray(memory[spots])
    if stored.dtype == np.complex128:
        stored, values = stored.view(np.uint64), np.ascontiguousarray(values).view(np.uint64)
    if not np.array_equal(stored, values):
        raise Race("two lanes of one instruction store different values to the same address")
