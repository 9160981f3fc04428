"""Prove that a wait has no effect, for faults that omit one.

A wait can be omitted if none of the operations that it waits for can be in flight, or if another wait completes them
before the next barrier or branch, and before the next instruction that uses a register written by these operations.
"""

from __future__ import annotations

from tests.amdgcn import flow
from tests.amdgcn.machine import Program
from tests.amdgcn.machine.compiling import Compiling
from tests.amdgcn.machine.waits import limits

# The operations that may be in flight, as indices of their instructions.
Flight = frozenset[int]


def waited(program: Program, index: int) -> list[tuple[str, int]]:
    """The (counter, remaining operations) pairs of a wait; empty for any other instruction."""
    return limits(Compiling(program.instructions[index], program.target, None, index)) or []


def counter(program: Program, index: int) -> str | None:
    """The counter that an instruction increments, or None if it is not a memory operation."""
    instruction = program.instructions[index]
    family, _, rest = instruction.mnemonic.partition("_")
    counters = program.target.counters
    if family == "ds":
        return counters["lds"]
    if family in ("global", "buffer", "scratch", "flat"):
        return counters["store" if "store" in rest else "load"]
    return counters["scalar"] if instruction.mnemonic.startswith(("s_load", "s_buffer")) else None


def implied(program: Program, index: int) -> str | None:
    """Return the reason why the wait at this index has no effect, or None if there is no proof."""
    in_flight = _in_flight(program).get(index)
    if in_flight is None:
        return None
    pending = {name: left for name, left in waited(program, index) if _counted_by(program, in_flight, name)}
    if not pending:
        return "no operation that it waits for can be in flight"
    awaited = [operation for name in pending for operation in _counted_by(program, in_flight, name)]
    registers = frozenset[int]().union(*(flow.writes(program.instructions[operation]) for operation in awaited))
    # Counter → number of operations issued after the wait.
    issued = dict.fromkeys(pending, 0)
    unordered = {counter(program, operation) for operation in awaited if _scalar(program, operation)}
    for later in range(index + 1, len(program.instructions)):
        instruction = program.instructions[later]
        if instruction.mnemonic.startswith("s_wait"):
            for name, left in waited(program, later):
                if name in pending and (left == 0 or (name not in unordered and left - issued[name] <= pending[name])):
                    del pending[name]
            if not pending:
                return "a later wait completes the same operations before their results are read"
            continue
        if instruction.mnemonic.startswith(("s_barrier", "s_branch", "s_cbranch", "s_endpgm", "s_setpc", "s_swappc")):
            return None
        if not registers.isdisjoint(flow.reads(instruction) | flow.writes(instruction)):
            return None
        name = counter(program, later)
        if name in issued:
            issued[name] += 1
            unordered |= {name} if _scalar(program, later) else set()
    return None


def _counted_by(program: Program, in_flight: Flight, name: str) -> list[int]:
    return [operation for operation in in_flight if counter(program, operation) == name]


def _scalar(program: Program, index: int) -> bool:
    return program.instructions[index].mnemonic.startswith("s_")


def _in_flight(program: Program) -> dict[int, Flight]:
    """The operations that may be in flight before every reachable instruction. An operation counts as completed
    only after a wait for zero."""
    before: dict[int, Flight] = {}
    left: list[tuple[int, Flight]] = [(0, frozenset()), (program.source.entry, frozenset())]
    while left:
        index, in_flight = left.pop()
        known = before.get(index)
        if known is not None and in_flight <= known:
            continue
        before[index] = in_flight = in_flight | (known or frozenset())
        ended = {name for name, count in waited(program, index) if count == 0}
        after = frozenset(operation for operation in in_flight if counter(program, operation) not in ended)
        if counter(program, index):
            after |= {index}
        left += [(operation, after) for operation in flow.followers(program, index)]
    return before
