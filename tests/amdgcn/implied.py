"""Whether a wait changes nothing: for proofs about faults that leave one out.

A wait delivers what is in flight. It may be left out where nothing can be, or where another wait that delivers as much
follows before anything could notice: an instruction that names a register on its way, a barrier, a branch.
"""

from __future__ import annotations

from tests.amdgcn import flow
from tests.amdgcn.machine import Program
from tests.amdgcn.machine.compiling import Compiling
from tests.amdgcn.machine.waits import limits

Flight = frozenset[int]  # the operations that may be in flight: the indices of their instructions


def waited(program: Program, index: int) -> list[tuple[str, int]]:
    """(counter, operations that are left) of a wait; nothing of any other instruction."""
    return limits(Compiling(program.instructions[index], program.target, None, index)) or []


def counter(program: Program, index: int) -> str | None:
    """The counter that an operation of memory increments, or None."""
    instruction = program.instructions[index]
    family, _, rest = instruction.mnemonic.partition("_")
    counters = program.target.counters
    if family == "ds":
        return counters["lds"]
    if family in ("global", "buffer", "scratch", "flat"):
        return counters["store" if "store" in rest else "load"]
    return counters["scalar"] if instruction.mnemonic.startswith(("s_load", "s_buffer")) else None


def implied(program: Program, index: int) -> str | None:
    """Why the wait at this place changes nothing, or None."""
    flying = _in_flight(program).get(index)
    if flying is None:
        return None
    open_ = {name: left for name, left in waited(program, index) if _of(program, flying, name)}
    if not open_:
        return "nothing that it waits for can be in flight"
    awaited = [each for name in open_ for each in _of(program, flying, name)]
    registers = frozenset[int]().union(*(flow.writes(program.instructions[each]) for each in awaited))
    issued = dict.fromkeys(open_, 0)  # since then
    unordered = {counter(program, each) for each in awaited if _scalar(program, each)}
    for place in range(index + 1, len(program.instructions)):
        instruction = program.instructions[place]
        if instruction.mnemonic.startswith("s_wait"):
            for name, left in waited(program, place):
                if name in open_ and (left == 0 or (name not in unordered and left - issued[name] <= open_[name])):
                    del open_[name]
            if not open_:
                return "a wait behind it delivers as much before anything reads it"
            continue
        if instruction.mnemonic.startswith(("s_barrier", "s_branch", "s_cbranch", "s_endpgm", "s_setpc", "s_swappc")):
            return None
        if not registers.isdisjoint(flow.reads(instruction) | flow.writes(instruction)):
            return None
        name = counter(program, place)
        if name in issued:
            issued[name] += 1
            unordered |= {name} if _scalar(program, place) else set()
    return None


def _of(program: Program, flying: Flight, name: str) -> list[int]:
    return [each for each in flying if counter(program, each) == name]


def _scalar(program: Program, index: int) -> bool:
    return program.instructions[index].mnemonic.startswith("s_")


def _in_flight(program: Program) -> dict[int, Flight]:
    """Before every instruction that can be reached. Only a wait for none is taken to end an operation."""
    before: dict[int, Flight] = {}
    left: list[tuple[int, Flight]] = [(0, frozenset()), (program.source.entry, frozenset())]
    while left:
        index, flying = left.pop()
        known = before.get(index)
        if known is not None and flying <= known:
            continue
        before[index] = flying = flying | (known or frozenset())
        ended = {name for name, count in waited(program, index) if count == 0}
        after = frozenset(each for each in flying if counter(program, each) not in ended)
        if counter(program, index):
            after |= {index}
        left += [(each, after) for each in flow.followers(program, index)]
    return before
