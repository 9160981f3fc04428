"""The registers of a batch of waves that are at the same instruction.

All waves of a batch execute the same instruction at the same time with one numpy call: vector registers are [register,
wave, lane], scalar registers [register, wave]. A divergent branch splits the batch into two; batches that arrive at the
same instruction are joined again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .operands import EXEC
from .targets import Target

_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


class State:
    """One batch.

    waves: the index of every wave in the grid; groups: the index of every wave's workgroup in the grid; local: the
    index of every wave in its workgroup. lds_base: the start of the workgroup's LDS. flight: the memory operations
    that no wait has completed. busy: the registers that they will write. rank: batches with a lower rank run first.
    where: the `where=` argument for numpy ufuncs: the active lanes, or True while every lane is active.
    """

    def __init__(
        self,
        target: Target,
        vectors: np.ndarray,
        scalars: np.ndarray,
        waves: np.ndarray,
        groups: np.ndarray,
        local: np.ndarray,
    ) -> None:
        self.target = target
        self.count, self.lanes = vectors.shape[1:]
        self.waves, self.groups, self.local = waves, groups, local
        self.lds_base = np.zeros(self.count, np.int64)
        self.scc = np.zeros(self.count, bool)
        self._bind(vectors, scalars)
        self.flight: list[Any] = []
        self.busy: dict[int, Any] = {}
        self.signalled = False
        self.overflow_clamps = False  # MODE.FP16_OVFL
        self.pc = 0
        self.rank = 0
        self.clock = 0
        self.late: dict[int, tuple[int, str]] = {}

    def _bind(self, vectors: np.ndarray, scalars: np.ndarray) -> None:
        self.v, self.s = vectors, scalars
        self.vf, self.vi = vectors.view(np.float32), vectors.view(np.int32)
        self._masks: dict[int, np.ndarray] = {}
        self._load_exec()

    # Lanes

    def _load_exec(self) -> None:
        self.x = self._unpack(EXEC)
        self.full = bool(self.x.all())
        self.where: Any = True if self.full else self.x

    def _unpack(self, register: int) -> np.ndarray:
        words = self.s[register : register + self.lanes // 32]
        packed = np.ascontiguousarray(words.T).view(np.uint8)
        return np.unpackbits(packed, axis=1, bitorder="little").view(bool)

    def mask(self, register: int) -> np.ndarray:
        """Read a scalar register, or a pair, as a lane mask: bool [waves, lanes]."""
        if register == EXEC:
            return self.x
        cached = self._masks.get(register)
        if cached is None:
            cached = self._masks[register] = self._unpack(register)
        return cached

    def put_mask(self, register: int, lanes: np.ndarray) -> None:
        """Write a lane mask, in which inactive lanes are zero, to a scalar register or a pair."""
        packed = np.packbits(lanes, axis=1, bitorder="little").view(np.uint32)
        words = self.lanes // 32
        self.s[register : register + words] = packed.T
        self.changed(register, words)
        self._masks[register] = lanes
        if register == EXEC:
            self._load_exec()

    def changed(self, register: int, count: int) -> None:
        """Drop cached values that depend on scalar registers that were written."""
        if self._masks:
            for index in range(register - 1, register + count):
                self._masks.pop(index, None)
        if register + count > EXEC:
            self._load_exec()

    # Scalar registers

    def put_scalar(self, register: int, value: np.ndarray) -> None:
        self.s[register] = value
        self.changed(register, 1)

    def scalar_pair(self, register: int) -> np.ndarray:
        return self.s[register] | self.s[register + 1].astype(np.uint64) << _WORD

    def put_scalar_pair(self, register: int, value: np.ndarray) -> None:
        self.s[register] = value & _LOW
        self.s[register + 1] = value >> _WORD
        self.changed(register, 2)

    # Vector registers

    def halves(self, register: int, half: int) -> np.ndarray:
        """A view of the low or high 16 bits of every lane: uint16 [waves, lanes]."""
        return self.v[register].view(np.uint16)[:, half::2]

    def pair(self, register: int) -> np.ndarray:
        return self.v[register] | self.v[register + 1].astype(np.uint64) << _WORD

    def put(self, register: int, value: np.ndarray) -> None:
        """Write the active lanes of a vector register. value: 32 bits of any type, broadcast to [waves, lanes]."""
        np.copyto(self.v[register], value.view(np.uint32), where=self.where)

    def put_pair(self, register: int, value: np.ndarray) -> None:
        """Write 64 bits per lane to two consecutive registers."""
        bits = value.view(np.uint64)
        np.copyto(self.v[register], (bits & _LOW).astype(np.uint32), where=self.where)
        np.copyto(self.v[register + 1], (bits >> _WORD).astype(np.uint32), where=self.where)

    def put_half(self, register: int, half: int, value: np.ndarray) -> None:
        """Write 16 bits per lane; the other half is unchanged."""
        np.copyto(self.halves(register, half), value.view(np.uint16), where=self.where)

    # Splitting and joining

    def select(self, chosen: np.ndarray) -> State:
        """Return a batch of the chosen waves. chosen: bool [waves]."""
        part = State.__new__(State)
        part.target, part.rank = self.target, self.rank
        part.count, part.lanes = int(chosen.sum()), self.lanes
        part.waves, part.groups, part.local = self.waves[chosen], self.groups[chosen], self.local[chosen]
        part.lds_base, part.scc = self.lds_base[chosen], self.scc[chosen]
        part._bind(np.ascontiguousarray(self.v[:, chosen]), np.ascontiguousarray(self.s[:, chosen]))
        part.flight = [ticket.select(chosen) for ticket in self.flight]
        part.busy = {register: ticket for ticket in part.flight for register in ticket.registers}
        part.signalled, part.overflow_clamps = self.signalled, self.overflow_clamps
        part.pc, part.clock, part.late = self.pc, self.clock, dict(self.late)
        return part

    def joins(self, other: State) -> bool:
        """Whether the two batches can be joined: they are at the same instruction, with the same mode and barrier
        state, and the same operations are in flight."""
        return (
            self.pc == other.pc
            and self.signalled == other.signalled
            and self.overflow_clamps == other.overflow_clamps
            and [ticket.origin for ticket in self.flight] == [ticket.origin for ticket in other.flight]
        )

    @staticmethod
    def join(parts: Sequence[State]) -> State:
        """Join several batches into one."""
        first = parts[0]
        whole = State.__new__(State)
        whole.target, whole.rank = first.target, first.rank
        whole.count, whole.lanes = sum(part.count for part in parts), first.lanes
        for name in ("waves", "groups", "local", "lds_base", "scc"):
            setattr(whole, name, np.concatenate([getattr(part, name) for part in parts]))
        whole._bind(
            np.concatenate([part.v for part in parts], axis=1), np.concatenate([part.s for part in parts], axis=1)
        )
        whole.flight = [tickets[0].join(tickets) for tickets in zip(*(part.flight for part in parts), strict=True)]
        whole.busy = {register: ticket for ticket in whole.flight for register in ticket.registers}
        whole.signalled, whole.overflow_clamps = first.signalled, first.overflow_clamps
        whole.pc, whole.clock = first.pc, max(part.clock for part in parts)
        whole.late = {}
        for part in parts:
            for register, (ready, text) in part.late.items():
                distance = ready - part.clock + whole.clock
                if distance > whole.late.get(register, (0, ""))[0]:
                    whole.late[register] = (distance, text)
        return whole
