"""Scratch memory, which is private to a lane: scratch_load and scratch_store of whole words, as in register spills."""

from __future__ import annotations

import re

import numpy as np

from .compiling import Compiling, Step
from .errors import OutOfBounds
from .operands import scalar_reader
from .state import State
from .vector_memory import HINTS, SIZES
from .waits import Ticket, issue


def compile_scratch(c: Compiling) -> Step | None:
    match = re.fullmatch(r"scratch_(load|store)_(\w+)", c.base)
    if not match or match[2] not in SIZES:
        return None
    size = SIZES[match[2]][0]
    if size % 4:
        raise c.refuse("scratch accesses narrower than a word are not implemented")
    for hint in HINTS:
        c.take(hint)
    load = match[1] == "load"
    target, vector, base = c.operands if load else (c.operands[1], c.operands[0], c.operands[2])
    if vector.kind != "none":
        raise c.refuse("scratch addresses in vector registers are not implemented")
    offset, machine, index = c.take("offset", 0), c.machine, c.index
    start = None if base.kind == "none" else scalar_reader(base, "u")
    counter, first, count = c.target.counters["load" if load else "store"], target.register, size // 4
    registers = frozenset(range(first, first + count))

    def words(state: State) -> np.ndarray:
        """The indices of the words in a lane's scratch: [words, waves]."""
        offsets = np.full(state.count, offset, np.int64) if start is None else offset + start(state).astype(np.int64)
        return machine.scratch.words(offsets, count, index)

    def load_step(state: State) -> None:
        values = machine.scratch.data[words(state), state.waves]
        result = [(first + i, values[i]) for i in range(count)]
        issue(state, Ticket(counter, "vmem", index, registers, result, True if state.full else state.x))

    def store_step(state: State) -> None:
        indices = words(state)
        old = machine.scratch.data[indices, state.waves]
        machine.scratch.data[indices, state.waves] = np.where(state.x, state.v[first : first + count], old)
        issue(state, Ticket(counter, "vmem", index, frozenset(), [], True))

    return load_step if load else store_step


class Scratch:
    """The scratch memory of a launch's waves: [words, waves, lanes]. It is initialised with garbage."""

    def __init__(self, size: int, garbage: np.ndarray, waves: int) -> None:
        """size: bytes per lane. garbage: [words, lanes]."""
        self.size = size
        self.data = np.repeat(garbage[:, None, :], waves, axis=1)

    def words(self, offsets: np.ndarray, count: int, index: int) -> np.ndarray:
        """The indices [count, waves] of the words at these byte offsets."""
        if (offsets % 4).any() or (offsets < 0).any() or (offsets + 4 * count > self.size).any():
            raise OutOfBounds(
                f"instruction {index} accesses scratch at bytes {offsets.tolist()} of {self.size} bytes per lane"
            )
        return offsets // 4 + np.arange(count)[:, None]
