"""Prove that a one-instruction fault changes nothing in a compiled variant.

If no case detects a fault, either the cases are incomplete or the fault has no effect. This module can prove the
latter, for one compiled variant and for all data and sizes, in one of these ways:

- the instruction computes the same value as before, from constants and the thread's index alone;
- an omitted wait has nothing to wait for, or another wait completes the same operations before their results are read;
- the registers that differ are overwritten before they are read, on every path;
- the lanes that differ are always idle: in launches with random bits, including NaN and infinity, no value in these
  lanes changes any byte of the result, and no mask or branch of the variant depends on an argument.

Equal results in a number of launches are not a proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tests.amdgcn import flow, implied
from tests.amdgcn.machine import MachineError, Memory, Program, launch
from tests.amdgcn.machine.operands import SCALAR
from tests.amdgcn.machine.state import State

_SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-40, 1e-7, 1.0, -1.0, 60000.0, 3e38)
# Maximum number of launches per recorded launch and kind of input data, each with new random values in the registers
# that differ.
FILLS = 3
# Maximum bytes of a recorded launch.
_MAX_BYTES = 1 << 22
# Maximum instructions of a repeated launch.
_LIMIT = 2_000_000
# The faulty instruction may name a register beyond those of the original program.
_BANKS = ("vectors", "accumulators")
_CONTROL = ("s_endpgm", "s_barrier", "s_branch", "s_cbranch", "s_wait")
_MEMORY = ("ds_", "global_", "buffer_", "scratch_", "s_load", "s_buffer")


@dataclass(frozen=True)
class RecordedLaunch:
    """One recorded launch. buffers: address, bytes, hidden bytes or None, dtype of the elements."""

    kernarg: bytes
    buffers: tuple[tuple[int, np.ndarray, np.ndarray | None, Any], ...]
    contract: Any
    settings: dict[str, Any]

    @property
    def size(self) -> int:
        return sum(data.size for _, data, _, _ in self.buffers)

    @property
    def worth_keeping(self) -> bool:
        return self.size <= _MAX_BYTES

    def outcome(self, program: Program, bits: str, seed: int) -> Any:
        """Repeat the launch and return the resulting memory, or the name of the error. bits: the key in `BITS` of the
        function that fills buffers of floats."""
        memory, copies = Memory(self.contract), []
        rng = np.random.default_rng(seed)
        for address, data, hidden, dtype in self.buffers:
            copy = data.copy()
            BITS[bits](copy, dtype, rng)
            memory.add(address, copy)
            if hidden is not None:
                memory.buffer_at(address).hide(hidden)
            copies.append(copy)
        try:
            launch(program, kernarg=self.kernarg, memory=memory, **{**self.settings, "limit": _LIMIT})
        except MachineError as error:
            return type(error).__name__
        return tuple(copy.tobytes() for copy in copies)


def _as_they_are(data: np.ndarray, dtype: Any, rng: np.random.Generator) -> None:
    pass


def _any_bits(data: np.ndarray, dtype: Any, rng: np.random.Generator) -> None:
    """Fill a buffer of floats: about half of the elements are special values, the others have random bits."""
    if dtype.is_floating_point:
        data[:] = rng.integers(0, 256, data.size, np.uint8)
        special = torch.tensor(_SPECIAL).to(dtype).view(torch.uint8).numpy().reshape(-1, dtype.itemsize)
        whole = data[: data.size - data.size % dtype.itemsize].reshape(-1, dtype.itemsize)
        chosen = rng.random(len(whole)) < 0.5
        whole[chosen] = special[rng.integers(0, len(special), int(chosen.sum()))]


def _usual(data: np.ndarray, dtype: Any, rng: np.random.Generator) -> None:
    if dtype in (torch.float32, torch.bfloat16, torch.float16):
        whole = data[: data.size - data.size % dtype.itemsize]
        drawn = torch.from_numpy(rng.standard_normal(whole.size // dtype.itemsize)).to(dtype)
        whole[:] = drawn.view(torch.uint8).numpy()


BITS: dict[str, Callable[[np.ndarray, Any, np.random.Generator], None]] = {
    "as they are": _as_they_are,
    "usual": _usual,
    "any": _any_bits,
}


def proof(whole: Program, changed: Program, index: int, launches: Sequence[RecordedLaunch]) -> str | None:
    """Return the reason why a fault changes nothing, or None if there is no proof."""
    texts = whole.instructions[index].text, changed.instructions[index].text
    if texts[0].startswith("s_wait") and texts[1] == "s_nop 0":
        return implied.implied(whole, index)
    if any(text.startswith(_CONTROL) for text in texts) or not launches:
        return None
    if any(text.startswith(_MEMORY) for text in texts):
        return None
    watched = _Watched(whole, changed, index)
    if not watched.unharmed(launches):
        return None
    taints = flow.Taints(whole)
    if not watched.differed:
        fixed = not (taints.sources(index) | flow.Taints(changed).sources(index))
        return "it computes the same value from constants and the thread's index" if fixed else None
    if all(flow.dead(program, index, watched.differed) for program in (whole, changed)):
        return "the difference is overwritten before it is read"
    if not taints.masks & flow.ARGUMENT:
        return "the difference is in lanes that are always idle in this variant"
    return None


class _Watched:
    """A program that executes both instructions and fills the registers where they differ with random values."""

    def __init__(self, whole: Program, changed: Program, index: int) -> None:
        self.whole, self.changed, self.index = whole, changed, index
        named = whole.registers[index] | changed.registers[index]
        self.rows = sorted(register for register in named if register < SCALAR)
        self.differed: set[int] = set()
        self.random = np.random.default_rng(0)

    def unharmed(self, launches: Sequence[RecordedLaunch]) -> bool:
        """Whether all launches store the same bytes as without the fault, even if the registers in which the two
        instructions differ are filled with random values."""
        banks = {name: max(getattr(self.whole, name), getattr(self.changed, name)) for name in _BANKS}
        program = replace(self.whole, steps=tuple(self._steps()), **banks)
        for seed, recorded in enumerate(launches):
            for bits in BITS:
                before = recorded.outcome(self.whole, bits, seed)
                if recorded.outcome(self.changed, bits, seed) != before:
                    return False
                known = set(self.differed)
                for _ in range(FILLS):
                    if recorded.outcome(program, bits, seed) != before:
                        return False
                    if not self.differed - known:
                        # Every register that differed had also differed in an earlier launch.
                        break
        return True

    def _steps(self) -> Iterator[Any]:
        for number, step in enumerate(self.whole.steps):
            yield self._both if number == self.index else step

    def _both(self, state: State) -> Any:
        before = self._snapshot(state)
        target = self.whole.steps[self.index](state)
        expected = self._snapshot(state)
        self._restore(state, before)
        self.changed.steps[self.index](state)
        actual = self._snapshot(state)
        self._restore(state, self._filled(expected, actual))
        return target

    def _snapshot(self, state: State) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return state.v[self.rows].copy(), state.s.copy(), state.scc.copy()

    def _restore(self, state: State, values: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        state.v[self.rows] = values[0]
        state.s[:], state.scc = values[1], values[2].copy()
        state.changed(0, 128)

    def _filled(self, expected: Any, actual: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        vectors, scalars, scc = (part.copy() for part in expected)
        other = expected[0] != actual[0]
        self.differed |= {row for row, any_ in zip(self.rows, other.any((1, 2)), strict=True) if any_}
        vectors[other] = _random_bits(self.random, int(other.sum()))
        other = expected[1] != actual[1]
        self.differed |= {SCALAR + row for row in np.flatnonzero(other.any(1)).tolist()}
        # Change only the bits that differ, such as some lanes of a mask.
        bits = (expected[1] ^ actual[1])[other]
        scalars[other] ^= bits & self.random.integers(0, 2**32, bits.size, np.uint32)
        other = expected[2] != actual[2]
        if other.any():
            self.differed.add(flow.SCC)
            scc[other] = self.random.random(int(other.sum())) < 0.5
        return vectors, scalars, scc


_SPECIAL_BITS = np.array([0, 0x7FC00000, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFFFFFFFF, 0x3F800000], np.uint32)


def _random_bits(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.where(rng.random(count) < 0.5, rng.choice(_SPECIAL_BITS, count), rng.integers(0, 2**32, count, np.uint32))
