"""Barriers in the assembly that a wave can reach while its stores to LDS are in flight.

A barrier orders only completed operations, so the compiler makes every wave wait for its stores to LDS first. Without
this wait, another wave may read the bytes too early. A launch detects this only if it executes that path and two waves
access the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.amdgcn import flow
from tests.amdgcn.implied import waited
from tests.amdgcn.machine import Program


def without_wait(program: Program) -> Iterator[tuple[int, int]]:
    """Yield (barrier, store) for every barrier that a path reaches from a store to LDS without a wait for the store."""
    counter = program.target.counters["lds"]
    seen = set[int]()
    for store, instruction in enumerate(program.instructions):
        left = list(flow.followers(program, store)) if _stores(instruction.mnemonic) else []
        while left:
            index = left.pop()
            if index in seen:
                continue
            seen.add(index)
            if program.instructions[index].mnemonic in ("s_barrier", "s_barrier_signal"):
                yield index, store
            elif (counter, 0) not in waited(program, index):
                left += flow.followers(program, index)


def _stores(mnemonic: str) -> bool:
    return mnemonic.startswith(("ds_write", "ds_store"))
