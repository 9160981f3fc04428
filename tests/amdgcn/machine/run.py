"""Launch a program: set up the waves of a grid, run them and detect races."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import operands
from .errors import EarlyAccess, Hazard, MachineError, Runaway
from .lds import Lds
from .memory import Memory
from .operands import ACC, EXEC, SCALAR, TTMP
from .program import Program
from .races import check_launch
from .scratch import Scratch
from .state import State

# The largest number of waves that run at the same time, unless a workgroup has more.
_BATCH = 256


@dataclass
class Report:
    """The result of a launch.

    reached: the indices of the instructions that were executed. instructions: number of executed wave instructions.
    bytes_requested: number of bytes that the lanes of vector instructions load and store in global memory.
    bytes_needed: number of distinct bytes that are loaded or stored in global memory, excluding the arguments.
    written: for the address of every writable buffer, which bytes were written.
    """

    reached: set[int] = field(default_factory=set)
    instructions: int = 0
    bytes_requested: int = 0
    bytes_needed: int = 0
    written: dict[int, np.ndarray] = field(default_factory=dict)


def launch(
    program: Program,
    grid: tuple[int, int, int],
    kernarg: bytes,
    memory: Memory,
    waves: int,
    lds: int = 0,
    seed: int = 0,
    limit: int = 50_000_000,
) -> Report:
    """Execute a grid of workgroups and write the results back to the caller's buffers.

    kernarg: the argument block, with hidden arguments. waves: per workgroup. lds: bytes per workgroup. seed: determines
    the garbage in registers, LDS and scratch, the order in which waves run, and whether arguments are preloaded. limit:
    maximum number of executed wave instructions.
    """
    block = np.frombuffer(bytes(kernarg).ljust(max(program.kernarg_size, 64), b"\0"), np.uint8).copy()
    address = memory.place(block, writable=False)
    with np.errstate(all="ignore"):
        return Launch(program, grid, address, block, memory, waves, lds, seed, limit).run()


class Launch:
    """One launch in progress."""

    def __init__(
        self,
        program: Program,
        grid: tuple[int, int, int],
        kernarg: int,
        block: np.ndarray,
        memory: Memory,
        waves: int,
        lds: int,
        seed: int,
        limit: int,
    ) -> None:
        self.program, self.grid, self.kernarg, self.block = program, grid, kernarg, block
        self.memory, self.waves, self.lds, self.limit = memory, waves, lds, limit
        self.random = np.random.default_rng(seed)
        self.preloads = bool(program.source.entry) and bool(self.random.integers(2))
        self.texts = [instruction.text for instruction in program.instructions]
        # +1 where execution starts, -1 after its end.
        self.reached = np.zeros(len(program.steps) + 1, np.int64)
        self.report = Report()

    def run(self) -> Report:
        for producer, consumer, missing in self.program.hazards:
            raise Hazard(
                f"{self.texts[consumer]!r} at {consumer} of {self.program.name} follows {self.texts[producer]!r} at "
                f"{producer} too early: {missing} more wait state{'s' * (missing > 1)} needed"
            )
        environment = self.program.environment
        environment.memory = self.memory
        total = self.grid[0] * self.grid[1] * self.grid[2]
        environment.scratch = self._scratch(total * self.waves)
        per_batch = max(1, _BATCH // self.waves)
        for first in range(0, total, per_batch):
            groups = np.arange(first, min(first + per_batch, total))
            environment.lds = Lds(len(groups), self.lds, self.random)
            self._run_batch(self._start(groups))
        self._finish()
        return self.report

    def _finish(self) -> None:
        for buffer in self.memory.buffers:
            if buffer.accesses and any(access.writes for access in buffer.accesses):
                where = f"the buffer at {buffer.address:#x}"
                check_launch(buffer.accesses, buffer.units[1].size, self.waves, self.texts, where)
        self.memory.write_back()
        report = self.report
        report.reached = set(np.flatnonzero(np.cumsum(self.reached)[:-1]).tolist())
        report.bytes_requested = self.memory.requested
        report.bytes_needed = sum(buffer.touched for buffer in self.memory.buffers if buffer.address != self.kernarg)
        report.written = {buffer.address: buffer.written for buffer in self.memory.buffers if buffer.writable}

    # Waves

    def _start(self, groups: np.ndarray) -> State:
        """Create the waves of some workgroups. Registers that the hardware does not initialise contain garbage."""
        target, lanes = self.program.target, self.program.target.lanes
        count = len(groups) * self.waves
        vectors = self._garbage(ACC + self.program.accumulators if self.program.accumulators else self.program.vectors)
        v = np.empty((len(vectors), count, lanes), np.uint32)
        v[:] = vectors[:, None, :]
        s = np.empty((128, count), np.uint32)
        s[:] = self._garbage(128)[:, :1]
        local = np.tile(np.arange(self.waves), len(groups))
        owner = np.repeat(groups, self.waves)
        state = State(target, v, s, owner * self.waves + local, owner, local)
        state.lds_base = np.repeat(np.arange(len(groups)), self.waves) * self.program.environment.lds.stride
        state.v[0] = local[:, None] * lanes + np.arange(lanes)
        mask = 2 ** min(lanes, 32) - 1
        state.s[EXEC], state.s[EXEC + 1] = mask, mask if lanes == 64 else 0
        self._set_scalars(state, owner, target)
        state.changed(0, 128)
        state.pc = self.program.source.entry if self.preloads else 0
        return state

    def _scratch(self, waves: int) -> Scratch:
        size = self.program.source.descriptor.get("private_segment_fixed_size", 0)
        return Scratch(size, self._garbage(size // 4), waves)

    def _garbage(self, count: int) -> np.ndarray:
        """Bits that are a huge unsigned integer, and a NaN in float32, bf16 and float16. Most bytes are a NaN in OCP's
        8-bit formats."""
        bits = self.random.integers(0, 2**32, (count, self.program.target.lanes), np.uint32)
        return bits & np.uint32(0x80208020) | np.uint32(0x7FDF7FDF)

    def _set_scalars(self, state: State, groups: np.ndarray, target: Any) -> None:
        descriptor = self.program.source.descriptor

        def enabled(name: str) -> bool:
            return bool(descriptor.get(f"user_sgpr_{name}"))

        index = 4 * enabled("private_segment_buffer") + 2 * enabled("dispatch_ptr") + 2 * enabled("queue_ptr")
        if enabled("kernarg_segment_ptr"):
            state.s[index], state.s[index + 1] = self.kernarg & 0xFFFFFFFF, self.kernarg >> 32
            index += 2
        index += 2 * enabled("dispatch_id") + enabled("private_segment_size")
        if self.preloads:
            first = descriptor.get("user_sgpr_kernarg_preload_offset", 0)
            words = self.block.view(np.uint32)[first : first + descriptor["user_sgpr_kernarg_preload_length"]]
            state.s[index : index + len(words)] = words[:, None]
        x, y = groups % self.grid[0], groups // self.grid[0] % self.grid[1]
        z = groups // (self.grid[0] * self.grid[1])
        if target.generation == 12:
            state.s[TTMP + 9] = x
            state.s[TTMP + 7] = y | z << 16
            return
        index = descriptor["user_sgpr_count"]
        for axis, value in zip("xyz", (x, y, z), strict=True):
            if descriptor.get(f"system_sgpr_workgroup_id_{axis}", int(axis == "x")):
                state.s[index] = value
                index += 1

    # Scheduling

    def _run_batch(self, state: State) -> None:
        """Run waves to their end, from barrier to barrier. Among the batches with the lowest rank, the one at the
        lowest address runs first, so that diverged paths reconverge."""
        ready, parked = list(self._ordered([state])), []
        while ready or parked:
            if not ready:
                ready = list(self._ordered(self._release(parked)))
                parked = []
            ready.sort(key=lambda batch: (batch.rank, batch.pc))
            current = ready.pop(0)
            others = [batch.pc for batch in ready if batch.rank == current.rank]
            outcome = self._advance(current, min(others, default=-1))
            if outcome == "barrier":
                parked.append(current)
            elif outcome == "stop":
                ready = self._joined([*ready, current])
            elif outcome == "end":
                self.ended(current)
            else:
                ready += outcome
        self.program.environment.lds.end_interval((), self.texts)

    def ended(self, batch: State) -> None:
        """Called with every batch that has ended, for tests that inspect registers."""

    def _ordered(self, batches: list[State]) -> Iterator[State]:
        """Occasionally split batches, so that some waves run to the next barrier before the others."""
        for batch in batches:
            batch.rank = 0
            first = self.random.random(batch.count) < 0.5 if self.random.random() < 0.25 else np.ones(1, bool)
            if first.all() or not first.any():
                yield batch
                continue
            later = batch.select(~first)
            later.rank = 1
            yield from (batch.select(first), later)

    def _release(self, parked: list[State]) -> list[State]:
        """End the interval between two barriers: every wave of every workgroup is at a barrier or has ended."""
        in_flight = [access for batch in parked for ticket in batch.flight for access in ticket.accesses]
        for access in in_flight:
            access.last = max(access.last, self.memory.epoch + 1)
        local = [a for batch in parked for t in batch.flight if t.kind == "lds" for a in t.accesses]
        self.program.environment.lds.end_interval(local, self.texts)
        self.memory.epoch += 1
        for batch in parked:
            batch.signalled = False
        return self._joined(parked)

    @staticmethod
    def _joined(batches: list[State]) -> list[State]:
        joined: list[list[State]] = []
        for batch in batches:
            for group in joined:
                if group[0].rank == batch.rank and group[0].joins(batch):
                    group.append(batch)
                    break
            else:
                joined.append([batch])
        result = []
        for group in joined:
            whole = State.join(group) if len(group) > 1 else group[0]
            result.append(whole)
        return result

    def _advance(self, state: State, stop: int) -> Any:
        """Run one batch to a barrier, its end, a branch that splits it, or `stop`, where another batch waits.

        A jump to `stop`, or to an address after it, also ends the run.
        """
        steps, registers = self.program.steps, self.program.registers
        pc = start = state.pc
        count = state.count
        try:
            while True:
                if state.busy and not registers[pc].isdisjoint(state.busy):
                    self._check_busy(state, pc)
                result = steps[pc](state)
                pc += 1
                if result is None:
                    if pc == stop:
                        self._account(start, pc, count)
                        state.pc = pc
                        return "stop"
                    continue
                self._account(start, pc, count)
                start = state.pc = pc
                if result is True or result == "barrier" or result == "end":
                    return result
                if isinstance(result, int):
                    start = pc = state.pc = result
                    if stop >= 0 and pc >= stop:
                        return "stop"
                    continue
                return self._split(state, *result)
        except MachineError as error:
            raise type(error)(f"{self.texts[pc]!r} at {pc} of {self.program.name}: {error}") from error

    def _split(self, state: State, taken: np.ndarray, destination: int) -> list[State]:
        branches, rest = state.select(taken), state.select(~taken)
        branches.pc = destination
        return [branches, rest]

    def _account(self, start: int, end: int, count: int) -> None:
        self.reached[start] += 1
        self.reached[end] -= 1
        self.report.instructions += (end - start) * count
        if self.report.instructions > self.limit:
            raise Runaway(f"more than {self.limit} instructions")

    def _check_busy(self, state: State, pc: int) -> None:
        """Raise `EarlyAccess` for a busy register, unless a load writes it after another load of the same kind: such
        loads complete in order."""
        touched = self.program.registers[pc] & state.busy.keys()
        for register in touched:
            ticket = state.busy[register]
            if not self._follows(ticket, pc, register):
                name = f"s{register - SCALAR}" if register >= SCALAR else f"v{register}"
                if ACC <= register < SCALAR:
                    name = f"a{register - ACC}"
                origin = self.texts[ticket.origin]
                raise EarlyAccess(f"{name} awaits the result of {origin!r} at {ticket.origin}")

    def _follows(self, ticket: Any, pc: int, register: int) -> bool:
        mnemonic = self.program.instructions[pc].mnemonic
        destination = self.program.instructions[pc].operands[:1]
        if ticket.kind == "scalar" or register not in operands.parse(destination[0]).registers:
            return False
        # The load preserves the other half, which the compiler treats as a read.
        if "d16" in mnemonic:
            return False
        kinds = {"ds": "lds", "global": "vmem", "buffer": "vmem"}
        loads = "_load" in mnemonic or "_read" in mnemonic
        return loads and kinds.get(mnemonic.split("_", 1)[0]) == ticket.kind


__all__ = ["Launch", "Report", "launch"]
