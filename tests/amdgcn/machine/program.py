"""A program: assembly text that is compiled once, to one Python function per instruction."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from . import hazards, operands, text
from .compare import compile_compare
from .compiling import Compiling, Step
from .eight_bit import compile_eight_bit
from .errors import UnknownInstruction
from .lanes import compile_lanes
from .lds import Lds, compile_lds
from .matrix import compile_matrix
from .memory import Memory
from .operands import SCALAR, VCC
from .packed import compile_packed
from .scalar import compile_scalar
from .scalar_fields import compile_scalar_fields
from .scalar_float import compile_scalar_float
from .scalar_memory import compile_scalar_load
from .scratch import Scratch, compile_scratch
from .state import State
from .targets import TARGETS, Target
from .text import Argument, Instruction, Source
from .vector import compile_scalar_transcendental, compile_vector
from .vector_memory import compile_vector_memory
from .waits import compile_wait
from .wide import compile_wide

_VECTOR = (
    compile_vector,
    compile_compare,
    compile_wide,
    compile_packed,
    compile_lanes,
    compile_matrix,
    compile_eight_bit,
    compile_scalar_transcendental,
)
FAMILIES: dict[str, tuple[Callable[[Compiling], Step | None], ...]] = {
    "s": (compile_wait, compile_scalar, compile_scalar_fields, compile_scalar_float, compile_scalar_load),
    "v": _VECTOR,
    "ds": (compile_lds,),
    "global": (compile_vector_memory,),
    "buffer": (compile_vector_memory,),
    "scratch": (compile_scratch,),
}

# Control-flow instructions and barriers, which `_control` compiles.
CONTROL = re.compile(r"s_(endpgm|barrier|barrier_signal|barrier_wait|branch|cbranch_\w+)")
_VCC_READERS = ("v_div_fmas_f32", "v_dual_cndmask_b32", "v_cndmask_b32_e32")


class Environment:
    """The memories that compiled instructions use. They are set for every launch."""

    memory: Memory
    lds: Lds
    scratch: Scratch


@dataclass(frozen=True)
class Program:
    """A kernel's machine code.

    registers: for every instruction, the registers that it names, and VCC for `_VCC_READERS`.
    """

    source: Source
    target: Target
    environment: Environment
    steps: tuple[Step, ...]
    registers: tuple[frozenset[int], ...]
    vectors: int
    accumulators: int

    @classmethod
    def parse(cls, assembly: str, arch: str) -> Program:
        """Compile assembly text. Raises `UnknownInstruction` if an instruction is not implemented."""
        if arch not in TARGETS:
            raise UnknownInstruction(f"architecture {arch!r}: expected one of {', '.join(TARGETS)}")
        return cls.of(text.read(assembly), TARGETS[arch])

    @classmethod
    def of(cls, source: Source, target: Target) -> Program:
        environment = Environment()
        steps = tuple(
            _compile(instruction, target, environment, index, source.labels)
            for index, instruction in enumerate(source.instructions)
        )
        registers = tuple(_registers(instruction) for instruction in source.instructions)
        return cls(source, target, environment, steps, registers, *_banks(registers))

    def with_instruction(self, index: int, line: str) -> Program:
        """A copy of the program with one instruction replaced, for planted faults."""
        changed = text.instruction(line)
        instructions = (*self.instructions[:index], changed, *self.instructions[index + 1 :])
        source = replace(self.source, instructions=instructions)
        step = _compile(changed, self.target, self.environment, index, source.labels)
        steps = (*self.steps[:index], step, *self.steps[index + 1 :])
        registers = (*self.registers[:index], _registers(changed), *self.registers[index + 1 :])
        banks = _banks(registers)
        return Program(source, self.target, self.environment, steps, registers, *banks)

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        return self.source.instructions

    @cached_property
    def hazards(self) -> tuple[tuple[int, int, int], ...]:
        """(producer, consumer, missing wait states) for instructions that are too close together."""
        return tuple(hazards.find(self.instructions, self.target))

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The offset, size and kind of the kernel's arguments, including hidden arguments."""
        return self.source.arguments

    @property
    def kernarg_size(self) -> int:
        return self.source.descriptor["kernarg_size"]


def _compile(instruction: Instruction, target: Target, environment: Environment, index: int, labels: Any) -> Step:
    if CONTROL.fullmatch(instruction.mnemonic):
        return _control(instruction, target, labels)
    if instruction.second:
        return _dual(instruction, target, environment, index)
    return _single(instruction, target, environment, index)


def _single(instruction: Instruction, target: Target, environment: Environment, index: int) -> Step:
    family = instruction.mnemonic.split("_", 1)[0]
    if family == "v" or (family == "s" and "load" not in instruction.mnemonic):
        # the steps of these instructions depend only on the state, so all programs share them
        key = instruction.mnemonic, instruction.operands, tuple(sorted(instruction.modifiers.items()))
        return _shared(Key(*key, instruction), target.name)
    return _compiled(instruction, target, environment, index, family)


def _compiled(instruction: Instruction, target: Target, environment: Any, index: int, family: str) -> Step:
    c = Compiling(instruction, target, environment, index)
    try:
        for compile_family in FAMILIES.get(family, ()):
            if step := compile_family(c):
                c.finish()
                return step
    except UnknownInstruction as error:
        if instruction.text in str(error):
            raise
        raise c.refuse(str(error)) from None
    raise c.refuse(f"{instruction.mnemonic} is not implemented")


@dataclass(frozen=True)
class Key:
    """The identity of an instruction, independent of its position."""

    mnemonic: str
    operands: tuple[str, ...]
    modifiers: tuple[tuple[str, Any], ...]
    instruction: Instruction = field(compare=False)


@cache
def _shared(key: Key, target: str) -> Step:
    return _compiled(key.instruction, TARGETS[target], None, -1, key.mnemonic.split("_", 1)[0])


def _dual(instruction: Instruction, target: Target, environment: Environment, index: int) -> Step:
    """A step for a dual-issue instruction: both halves read their sources before either writes its result."""
    assert instruction.second
    halves = [replace(instruction, second=None), instruction.second]
    plain = [replace(half, mnemonic=half.mnemonic.replace("v_dual_", "v_", 1)) for half in halves]
    first, second = (_single(half, target, environment, index) for half in plain)
    written = operands.parse(plain[0].operands[0]).register
    if written not in _registers(plain[1]):

        def in_order(state: State) -> None:
            first(state)
            second(state)

        return in_order

    def both(state: State) -> None:
        before = state.v[written].copy()
        first(state)
        after = state.v[written].copy()
        state.v[written] = before
        second(state)
        state.v[written] = after

    return both


def _control(instruction: Instruction, target: Target, labels: Any) -> Step:
    """A step for control flow. It returns the index of the next instruction, or (the waves that branch, the index to
    which they branch), or "end", "barrier" or None."""
    name = instruction.mnemonic
    if name == "s_endpgm":
        return lambda state: "end"
    if name in ("s_barrier", "s_barrier_wait"):
        return lambda state: "barrier"
    if name == "s_barrier_signal":
        return _signal
    label = instruction.operands[0]
    if label not in labels:
        raise UnknownInstruction(f"{instruction.text!r}: there is no label {label}")
    destination = labels[label]
    if name == "s_branch":
        return lambda state: destination
    condition = _condition(name.removeprefix("s_cbranch_"), target)
    if condition is None:
        raise UnknownInstruction(f"{instruction.text!r} on {target.name}")

    def branch(state: State) -> Any:
        taken = condition(state)
        if taken.all():
            return destination
        return (taken, destination) if taken.any() else None

    return branch


def _signal(state: State) -> None:
    state.signalled = True


def _condition(name: str, target: Target) -> Callable[[State], np.ndarray] | None:
    conditions: dict[str, Callable[[State], np.ndarray]] = {
        "scc0": lambda state: ~state.scc,
        "scc1": lambda state: state.scc,
        "execz": lambda state: ~state.x.any(1),
        "execnz": lambda state: state.x.any(1),
        "vccz": lambda state: ~state.mask(VCC).any(1),
        "vccnz": lambda state: state.mask(VCC).any(1),
    }
    return conditions.get(name)


def _registers(instruction: Instruction) -> frozenset[int]:
    """Every register that an instruction names, and VCC for `_VCC_READERS`."""
    named: set[int] = set()
    for word in instruction.operands:
        named |= _named(word)
    if instruction.mnemonic in _VCC_READERS:
        named |= {SCALAR + VCC, SCALAR + VCC + 1}
    if instruction.second:
        named |= _registers(instruction.second)
    return frozenset(named)


@cache
def _named(word: str) -> frozenset[int]:
    try:
        return operands.parse(word.removeprefix("sext(").rstrip(")")).registers
    except UnknownInstruction:
        # The word is a label or an expression.
        return frozenset()


def _banks(registers: tuple[frozenset[int], ...]) -> tuple[int, int]:
    """The numbers of vector and accumulation registers, up to the highest one that is used."""
    named = frozenset().union(*registers)
    vectors = max((r for r in named if r < operands.ACC), default=0) + 1
    accumulators = max((r - operands.ACC + 1 for r in named if operands.ACC <= r < SCALAR), default=0)
    return vectors, accumulators
