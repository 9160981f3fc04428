"""Scalar loads: one address per wave. The results arrive in SGPRs in any order."""

from __future__ import annotations

import re

import numpy as np

from .compiling import Compiling, Step
from .errors import OutOfBounds
from .operands import SCALAR, scalar_reader
from .state import State
from .waits import Ticket, issue

u32, u64 = np.uint32, np.uint64

_LOADS = {
    "dword": 4,
    "dwordx2": 8,
    "dwordx3": 12,
    "dwordx4": 16,
    "dwordx8": 32,
    "dwordx16": 64,
    "b32": 4,
    "b64": 8,
    "b96": 12,
    "b128": 16,
    "b256": 32,
    "b512": 64,
    "u8": 1,
    "i8": -1,
    "u16": 2,
    "i16": -2,
}


def compile_scalar_load(c: Compiling) -> Step | None:
    match = re.fullmatch(r"s_load_(\w+)", c.base)
    if not match or match[1] not in _LOADS:
        return None
    size = _LOADS[match[1]]
    target, base, offset = c.operands
    immediate = c.take("offset", 0)
    for ignored in ("glc", "dlc", "nv", "scope", "th"):
        c.take(ignored)
    address, extra = scalar_reader(base, "U"), scalar_reader(offset, "U" if offset.kind == "constant" else "u")
    count = max(1, abs(size) // 4)
    registers = frozenset(range(SCALAR + target.register, SCALAR + target.register + count))
    counter, machine, index = c.target.counters["scalar"], c.machine, c.index

    def step(state: State) -> None:
        addresses = address(state) + extra(state).astype(u64) + u64(immediate & 2**64 - 1)
        addresses = np.broadcast_to(addresses, state.count)
        # The hardware ignores the two lowest bits of the address.
        if abs(size) >= 4 and (addresses & u64(3)).any():
            raise OutOfBounds(
                f"{abs(size)} bytes at {int(addresses[0]):#x}: the address of a scalar load must be a multiple of 4"
            )
        words, access = machine.memory.load(addresses, abs(size), state, index, per_wave=True)
        if size < 0:
            words = words.astype(np.int8 if size == -1 else np.int16).astype(np.int32).view(u32)
        result = [(target.register + i, words[:, i].copy()) for i in range(count)]
        issue(state, Ticket(counter, "scalar", index, registers, result, True, accesses=access))

    return step
