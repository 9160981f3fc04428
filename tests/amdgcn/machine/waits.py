"""Memory operations in flight, and the counters on which a wave waits for them.

The result of a load is not written until the wave executes a wait that guarantees its completion, or waits because the
counter is at its maximum. Until then the destination registers are busy: accessing one is an error, except for a later
vector or LDS load of the same kind that overwrites the whole register.

Scalar loads complete in any order, so only a wait for zero completes them. Other operations of one kind complete in
order, so a wait for a count of n leaves the last n operations in flight.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .compiling import Compiling, Step
from .state import State

# gfx12 has one counter per kind of operation. No instruction here increments the counters of textures, ray
# tracing and exports.
_GFX12 = {"loadcnt": "load", "storecnt": "store", "dscnt": "ds", "kmcnt": "km"}
_IDLE = {"samplecnt", "bvhcnt", "expcnt"}
_FIELD = re.compile(r"(\w+?)cnt\((0x[0-9a-f]+|\d+)\)")


@dataclass(eq=False)
class Ticket:
    """One operation in flight. kind: "vmem", "lds" or "scalar". origin: the index of the instruction. registers: the
    registers that it writes. result: the values that `deliver` writes to them. accesses: the accesses to check for
    races."""

    counter: str
    kind: str
    origin: int
    registers: frozenset[int]
    result: list[tuple[int, np.ndarray]]
    lanes: Any
    half: int | None = None
    accesses: tuple[Any, ...] = ()

    def deliver(self, state: State) -> None:
        if self.kind == "scalar":
            for register, value in self.result:
                state.put_scalar(register, value)
            return
        for register, value in self.result:
            target = state.v[register] if self.half is None else state.halves(register, self.half)
            np.copyto(target, value, where=self.lanes)

    def select(self, chosen: np.ndarray) -> Ticket:
        lanes = self.lanes if self.lanes is True else self.lanes[chosen]
        result = [(register, np.ascontiguousarray(value[chosen])) for register, value in self.result]
        return Ticket(self.counter, self.kind, self.origin, self.registers, result, lanes, self.half, self.accesses)

    @staticmethod
    def join(tickets: Sequence[Ticket]) -> Ticket:
        first = tickets[0]
        result = [
            (first.result[i][0], np.concatenate([ticket.result[i][1] for ticket in tickets]))
            for i in range(len(first.result))
        ]
        lanes: Any = True
        if first.kind != "scalar" and any(ticket.lanes is not True for ticket in tickets):
            shape = [(len(ticket.result[0][1]) if ticket.result else 0) for ticket in tickets]
            lanes = np.concatenate(
                [
                    np.ones((count, ticket.result[0][1].shape[1]), bool) if ticket.lanes is True else ticket.lanes
                    for count, ticket in zip(shape, tickets, strict=True)
                    if ticket.result
                ]
                or [np.ones((0, 0), bool)]
            )
        accesses = tuple({id(access): access for ticket in tickets for access in ticket.accesses}.values())
        return Ticket(first.counter, first.kind, first.origin, first.registers, result, lanes, first.half, accesses)


def issue(state: State, ticket: Ticket) -> None:
    """Start an operation. If a counter is at its maximum, the wave waits for the oldest operation."""
    if len(state.flight) >= state.target.limits[ticket.counter]:
        wait(state, ticket.counter, state.target.limits[ticket.counter] - 1)
    state.flight.append(ticket)
    for register in ticket.registers:
        state.busy[register] = ticket


def wait(state: State, counter: str, count: int) -> None:
    """Complete the operations that must have completed when at most `count` are outstanding."""
    if not state.flight:
        return
    remaining: dict[str, int] = {}
    for ticket in state.flight:
        if ticket.counter == counter:
            remaining[ticket.kind] = remaining.get(ticket.kind, 0) + 1
    if not remaining:
        return
    kept = []
    for ticket in state.flight:
        if ticket.counter == counter:
            ordered = ticket.kind != "scalar"
            if (remaining[ticket.kind] > count) if ordered else count == 0:
                remaining[ticket.kind] -= 1
                ticket.deliver(state)
                continue
        kept.append(ticket)
    state.flight = kept
    state.busy = {register: ticket for ticket in kept for register in ticket.registers}


def compile_wait(c: Compiling) -> Step | None:
    """Compile s_waitcnt or one of its successors. Returns None for every other instruction."""
    counters = limits(c)
    return None if counters is None else _waits(counters)


def limits(c: Compiling) -> list[tuple[str, int]] | None:
    """The counters that an instruction waits for and the number of operations that it leaves in flight, or None if it
    is not a wait."""
    name, generation = c.base, c.target.generation
    if name == "s_waitcnt":
        return _old_counters(c)
    if name == "s_waitcnt_vscnt" and generation == 11:
        return [("vs", c.operands[-1].value)]
    if name.startswith("s_wait_") and name.endswith("cnt") and generation == 12:
        counters = name.removeprefix("s_wait_").split("_")
        if all(counter in _GFX12 or counter in _IDLE for counter in counters):
            values = _gfx12_limits(counters, c.operands[0].value)
            return [(_GFX12[counter], limit) for counter, limit in values if counter in _GFX12]
    return None


def _gfx12_limits(counters: list[str], value: int) -> list[tuple[str, int]]:
    if len(counters) == 1:
        return [(counters[0], value)]
    # In loadcnt_dscnt and storecnt_dscnt, the first counter is in bits 13:8, and the second in bits 5:0.
    first, second = counters
    return [(first, value >> 8 & 63), (second, value & 63)]


def _old_counters(c: Compiling) -> list[tuple[str, int]]:
    text = c.instruction.operands[0]
    fields = _FIELD.findall(text)
    left = _FIELD.sub("", text).replace("&", "").strip()
    unknown = {name for name, _ in fields} - {"vm", "lgkm", "exp"}
    if not fields or left or unknown:
        raise c.refuse("these counters are not implemented")
    return [(name, int(value, 0)) for name, value in fields if name != "exp"]


def _waits(limits: list[tuple[str, int]]) -> Step:
    if len(limits) == 1:
        counter, count = limits[0]
        return lambda state: wait(state, counter, count)

    def step(state: State) -> None:
        for counter, count in limits:
            wait(state, counter, count)

    return step
