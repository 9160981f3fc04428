"""Execute a few instructions on one workgroup with given registers, for the tests of single instructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .machine import Memory, Program
from .machine.lds import Lds
from .machine.operands import EXEC, parse
from .machine.run import Launch
from .machine.state import State
from .machine.targets import TARGETS

# One target per instruction set. Except for scalar floating-point instructions, every other target equals one of these.
ARCHITECTURES = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
CDNA = tuple(name for name in ARCHITECTURES if TARGETS[name].cdna)
RDNA = tuple(name for name in ARCHITECTURES if not TARGETS[name].cdna)

_KERNEL = """
k:
{lines}
    s_endpgm
    .amdhsa_kernel k
        .amdhsa_kernarg_size 64
        .amdhsa_private_segment_fixed_size 32
        .amdhsa_user_sgpr_count 2
        .amdhsa_user_sgpr_kernarg_segment_ptr 1
    .end_amdhsa_kernel
"""


def lanes(arch: str) -> int:
    return TARGETS[arch].lanes


def assembly(lines: str | Sequence[str]) -> str:
    return _KERNEL.format(lines=lines if isinstance(lines, str) else "\n".join(lines))


def program(arch: str, lines: str | Sequence[str]) -> Program:
    return Program.parse(assembly(lines), arch)


def execute(
    arch: str,
    lines: str | Sequence[str],
    registers: Mapping[str, Any] | None = None,
    *,
    active: int | None = None,
    memory: Memory | None = None,
    lds: int = 0,
    waves: int = 1,
    seed: int = 0,
) -> State:
    """Return the registers after the last instruction.

    registers: the initial bits of registers by name, such as "v3", "a1", "s[4:5]" or "vcc". For a vector register: an
    array [lanes] or [waves, lanes] of 4-byte elements, or one value. active: the bits of EXEC, one per lane.
    """
    code = program(arch, lines)
    block = np.zeros(64, np.uint8)
    launch = Launch(code, (1, 1, 1), 0, block, memory or Memory(), waves, lds, seed, 10_000)
    code.environment.memory = launch.memory
    code.environment.lds = Lds(1, lds, launch.random)
    code.environment.scratch = launch._scratch(waves)
    state = launch._start(np.arange(1))
    for name, value in (registers or {}).items():
        _set(state, name, value)
    if active is not None:
        state.s[EXEC], state.s[EXEC + 1] = active & 0xFFFFFFFF, active >> 32
    state.changed(0, 128)
    batches: list[State] = []
    launch.ended = batches.append  # type: ignore[method-assign]
    with np.errstate(all="ignore"):
        launch._run_batch(state)
    launch.memory.write_back()
    return batches[0] if len(batches) == 1 else _sorted(State.join(batches))


def _sorted(state: State) -> State:
    """Sort the waves by their index."""
    order = np.argsort(state.waves)
    state.waves, state.scc = state.waves[order], state.scc[order]
    state._bind(np.ascontiguousarray(state.v[:, order]), np.ascontiguousarray(state.s[:, order]))
    return state


def _set(state: State, name: str, value: Any) -> None:
    operand = parse(name)
    if operand.kind == "v":
        if operand.register >= len(state.v):
            # No instruction names this register.
            return
        array = np.asarray(value)
        if array.dtype.itemsize != 4 or array.dtype == object:
            array = array.astype(np.int64).astype(np.uint32)
        state.v[operand.register] = array.view(np.uint32)
        return
    for i in range(operand.count):
        state.s[operand.register + i] = int(value) >> 32 * i & 0xFFFFFFFF


def vector(state: State, name: str, dtype: Any = np.uint32, wave: int = 0) -> np.ndarray:
    """A vector register after the last instruction: [lanes]."""
    return state.v[parse(name).register][wave].view(dtype)


def scalar(state: State, name: str) -> int:
    """A scalar register, or a pair, of the first wave after the last instruction."""
    operand = parse(name)
    return sum(int(state.s[operand.register + i, 0]) << 32 * i for i in range(operand.count))
