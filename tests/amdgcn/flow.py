"""Data flow of a program: what registers depend on, and which are overwritten before they are read.

Both analyses are used to prove that faults have no effect. They are conservative: if in doubt, a
register counts as read, and depends on everything that an instruction names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from tests.amdgcn.machine import Program, UnknownInstruction
from tests.amdgcn.machine.operands import EXEC, SCALAR, TTMP, parse
from tests.amdgcn.machine.text import Instruction
from tests.amdgcn.machine.text import instruction as parsed

# What the value of a register depends on, as bit flags.
ARGUMENT, GRID, DATA = 1, 2, 4
SCC = SCALAR + 128
_EXEC = frozenset({SCALAR + EXEC, SCALAR + EXEC + 1})
_NOTHING = re.compile(
    r"(global|buffer|scratch|ds)_(store|write)\w*|v_cmpx_\w+|s_(cmp|bitcmp|nop|wait|delay|branch|cbranch|endpgm)\w*"
)
_SCC_WRITERS = re.compile(
    r"s_(cmpk?|bitcmp[01])_\w+|s_\w+_saveexec_\w+|s_(add|sub|addc|subb|add_co|add_co_ci|sub_co|sub_co_ci)_[iu]32"
    r"|s_(and|or|xor|nand|nor|xnor|not|andn2|orn2|and_not1|or_not1|wqm)_b(32|64)|s_(lshl|lshr|ashr|bfe)_[biu](32|64)"
    r"|s_lshl[1-4]_add_u32|s_(min|max|abs|absdiff)_[iu]32|s_addk_(co_)?i32"
)
_TWO = re.compile(r"v_(add|sub|subrev|addc|subb|subbrev)_co_\w+|v_div_scale\w+|v_mad_[ui]64\w+|v_\w*swap\w*")
_KEEPS = re.compile(r"v_(fmac|mac|dot\dc|writelane|permlane|swap)\w*|s_(cmov|bitset|addk|mulk|mov_b16)\w*|\w*d16\w*")
_LOADS = re.compile(r"(global|buffer|scratch)_load|ds_(read|load)")
_SCC_READERS = re.compile(r"s_(cselect|cbranch_scc|addc|subb|cmov)\w*")
_BOOLEAN = re.compile(r"v_cmpx?_\w+|s_(cmp|cmpk|bitcmp)\w*")
_FLOAT = re.compile(r"v_cmpx?_\w+_(f16|f32|bf16)\b|v_cmpx?_class_\w+")


@cache
def _named(word: str) -> frozenset[int]:
    try:
        return parse(word.removeprefix("sext(").rstrip(")")).registers
    except UnknownInstruction:
        return frozenset()


def writes(instruction: Instruction) -> frozenset[int]:
    """The registers that an instruction writes."""
    return _writes(instruction.text)


def reads(instruction: Instruction) -> frozenset[int]:
    """The registers that an instruction may read."""
    return _reads(instruction.text)


@cache
def _writes(line: str) -> frozenset[int]:
    instruction = parsed(line)
    name, words = instruction.mnemonic, instruction.operands
    out = _writes_second(instruction)
    if _SCC_WRITERS.fullmatch(name):
        out |= {SCC}
    if "saveexec" in name or name.startswith("v_cmpx"):
        out |= _EXEC
    if name.startswith("v_cmpx"):
        out |= {register for register in _named(words[0]) if register >= SCALAR}
    if _NOTHING.fullmatch(name) or not words:
        return out
    return out.union(*(_named(word) for word in words[: 2 if _TWO.match(name) else 1]))


def _writes_second(instruction: Instruction) -> frozenset[int]:
    return writes(instruction.second) if instruction.second else frozenset()


@cache
def _reads(line: str) -> frozenset[int]:
    instruction = parsed(line)
    name, words = instruction.mnemonic, instruction.operands
    plain = not (_keeps(instruction) or _NOTHING.fullmatch(name))
    first = (2 if _TWO.match(name) else 1) if plain else 0
    out = frozenset[int]().union(*(_named(word) for word in words[first:]))
    if not name.startswith("s_") or "saveexec" in name:
        out |= _EXEC
    if name in ("v_div_fmas_f32", "v_dual_cndmask_b32", "v_cndmask_b32_e32") or "vcc" in name:
        out |= _named("vcc")
    if "exec" in name:
        out |= _EXEC
    if _SCC_READERS.match(name):
        out |= {SCC}
    return out | reads(instruction.second) if instruction.second else out


def _keeps(instruction: Instruction) -> bool:
    """Whether an active lane may keep a part of the destination's previous value."""
    modifiers = instruction.modifiers
    if "dpp" in instruction.mnemonic or "op_sel" in modifiers or "_sdwa" in instruction.mnemonic:
        return True
    return any(word in instruction.text for word in ("row_", "quad_perm")) or bool(_KEEPS.match(instruction.mnemonic))


def followers(program: Program, index: int) -> Iterator[int]:
    """The possible next instructions of a wave."""
    instruction = program.instructions[index]
    if instruction.mnemonic == "s_endpgm":
        return
    if instruction.mnemonic.startswith(("s_branch", "s_cbranch")):
        yield program.source.labels[instruction.operands[0]]
    if instruction.mnemonic != "s_branch":
        yield index + 1


def dead(program: Program, index: int, registers: Sequence[int] | set[int]) -> bool:
    """Whether no path reads the values that these registers have after an instruction: they are overwritten first, or
    the program ends."""
    return all(not _is_read(program, index, register) for register in registers)


def _is_read(program: Program, index: int, register: int) -> bool:
    seen, left = set[tuple[int, bool]](), [(following, False) for following in followers(program, index)]
    while left:
        place = left.pop()
        if place in seen:
            continue
        seen.add(place)
        here, other_lanes = place
        instruction = program.instructions[here]
        if register in reads(instruction):
            return True
        written = writes(instruction)
        whole = register >= SCALAR or not other_lanes
        if register in written and whole and not _keeps(instruction):
            continue
        other_lanes = other_lanes or not _EXEC.isdisjoint(written)
        left += [(following, other_lanes) for following in followers(program, here)]
    return False


class Taints:
    """The dependencies of every instruction's sources. masks: the dependencies of the program's masks and branches."""

    def __init__(self, program: Program) -> None:
        self.program = program
        first = np.zeros(SCALAR + 129, np.uint8)
        # These registers are not initialised.
        first[1:SCALAR] = DATA
        first[SCALAR : SCALAR + TTMP + 16] = GRID
        first[SCALAR : SCALAR + program.source.descriptor.get("user_sgpr_count", 16)] = ARGUMENT
        first[sorted(_EXEC)] = 0
        self.before: dict[int, np.ndarray] = {}
        self._spread(first)
        self.masks = 0
        for index in self.before:
            self.masks |= self._mask(index)

    def sources(self, index: int) -> int:
        """The dependencies of the values that an instruction reads, and of its lane mask."""
        before = self.before.get(index)
        named = reads(self.program.instructions[index])
        if before is None or not named:
            return 0
        return int(np.bitwise_or.reduce(before[sorted(named)]))

    def _mask(self, index: int) -> int:
        """The dependencies of one comparison. A loaded integer counts as an argument; a loaded float does not."""
        name = self.program.instructions[index].mnemonic
        if not _BOOLEAN.match(name):
            return 0
        sources = self.sources(index)
        return sources | ARGUMENT if sources & DATA and not _FLOAT.match(name) else sources

    def _spread(self, first: np.ndarray) -> None:
        left = [(0, first), (self.program.source.entry, first)]
        while left:
            index, state = left.pop()
            known = self.before.get(index)
            if known is not None:
                merged = known | state
                if np.array_equal(merged, known):
                    continue
                state = merged
            self.before[index] = state
            after = self._after(index, state)
            left += [(following, after) for following in followers(self.program, index)]

    def _after(self, index: int, state: np.ndarray) -> np.ndarray:
        instruction = self.program.instructions[index]
        written = writes(instruction)
        if not written:
            return state
        after = state.copy()
        name = instruction.mnemonic
        value = self.sources(index)
        if _LOADS.match(name):
            value = DATA
        elif name.startswith("s_load"):
            value = ARGUMENT
        for register in written:
            # inactive lanes keep their values
            keeps = register < SCALAR and (_keeps(instruction) or state[SCALAR + EXEC])
            after[register] = state[register] | value if keeps else value
        return after
