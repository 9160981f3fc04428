"""Wait states that CDNA hardware does not insert. The compiler must insert s_nop or other instructions.

The rules are from the chapter on manually inserted wait states in the ISA documents, reduced to the pairs that occur in
compute kernels. Instructions are paired in the order of the text, without following jumps, because the compiler inserts
the wait states in this order. Pairs with s_branch or s_endpgm between them are not checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import operands
from .errors import UnknownInstruction
from .operands import EXEC, SCALAR, VCC
from .targets import Target
from .text import Instruction

_WINDOW = 19
_MFMA = re.compile(r"v_mfma_\w+?_(16x16|32x32)x\d+_?(\w*)")
_TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos)_f(32|16)(_\w+)?")
_TWO_RESULTS = re.compile(r"v_(div_scale|mad_u64|mad_i64|\w+_co)_")
_ACCUMULATE = re.compile(r"v_(pk_)?fmac_|v_mac_|v_dot\w*c_")
_VECTOR_MEMORY = ("global_", "buffer_", "flat_", "scratch_")
_EXEC = frozenset({SCALAR + EXEC, SCALAR + EXEC + 1})
_VCC = frozenset({SCALAR + VCC, SCALAR + VCC + 1})


@dataclass(frozen=True)
class Use:
    """The registers that one instruction reads and writes. kind: valu, mfma, memory (vector memory and LDS) or
    other. waits: the number of wait states that it provides."""

    kind: str
    reads: tuple[frozenset[int], ...]
    writes: frozenset[int]
    waits: int

    @property
    def read(self) -> frozenset[int]:
        return frozenset().union(*self.reads)


def find(instructions: Sequence[Instruction], target: Target) -> Iterator[tuple[int, int, int]]:
    """Yield (producer, consumer, missing wait states) for every pair that is too close together; none for RDNA."""
    if not target.cdna:
        return
    uses = [_use(instruction) for instruction in instructions]
    for consumer in range(len(instructions)):
        if uses[consumer].kind == "other":
            continue
        since = 0
        for producer in range(consumer - 1, -1, -1):
            mnemonic = instructions[producer].mnemonic
            if mnemonic in ("s_branch", "s_endpgm") or since >= _WINDOW:
                break
            if uses[producer].kind in ("valu", "mfma"):
                needed = _needed(instructions[producer], uses[producer], instructions[consumer], uses[consumer], target)
                if needed > since:
                    yield producer, consumer, needed - since
            since += uses[producer].waits


def _needed(first: Instruction, produced: Use, second: Instruction, used: Use, target: Target) -> int:
    """The number of wait states required between two instructions."""
    newer = target.name != "gfx90a"
    if produced.kind == "mfma":
        return _after_matrix(first, produced, used, target)
    changed = produced.writes
    needed = 0
    vectors = frozenset(register for register in changed if register < SCALAR)
    scalars = changed - vectors
    if used.kind == "mfma" and vectors & used.read:
        needed = max(needed, 2)
    if used.kind == "memory" and scalars & used.read:
        needed = max(needed, 5)
    if used.kind != "valu":
        return needed
    if second.mnemonic.endswith("_dpp"):
        if vectors & used.reads[0]:
            needed = max(needed, 2)
        if scalars & _EXEC:
            needed = max(needed, 5)
    if second.mnemonic.startswith("v_div_fmas") and scalars & _VCC:
        needed = max(needed, 4)
    if second.mnemonic.startswith(("v_readlane", "v_writelane")) and scalars & used.reads[-1]:
        needed = max(needed, 4)
    if newer and scalars & used.read:
        needed = max(needed, 2)
    if newer and second.mnemonic.startswith(("v_readlane", "v_readfirstlane")) and vectors & used.read:
        needed = max(needed, 1)
    is_transcendental = _TRANSCENDENTAL.fullmatch(first.mnemonic)
    if newer and is_transcendental and vectors & used.read and not _TRANSCENDENTAL.fullmatch(second.mnemonic):
        needed = max(needed, 1)
    return needed


def _after_matrix(first: Instruction, produced: Use, used: Use, target: Target) -> int:
    """The wait states after an MFMA whose result is read, or is overwritten by another VALU instruction."""
    match = _MFMA.match(first.mnemonic)
    if not match:
        return 0
    # An MFMA of float32 or xf32 takes more passes.
    single = match[2].startswith(("f32", "xf32"))
    if target.name == "gfx90a":
        states = 11 if match[1] == "16x16" else 19
    else:
        passes = (4 if match[1] == "16x16" else 8) * (2 if single else 1)
        states = passes + (2 if single else 3)
    # An MFMA may read the result as A or B. Reading it as C depends on forwarding, and is not checked.
    if used.kind == "mfma":
        operands_ab = used.reads[0] | used.reads[1]
        return states if produced.writes & operands_ab else 0
    touched = used.read | (used.writes if used.kind == "valu" else frozenset())
    return states if produced.writes & touched else 0


def _use(instruction: Instruction) -> Use:
    mnemonic = instruction.mnemonic
    if mnemonic == "s_nop":
        return Use("other", (), frozenset(), int(instruction.operands[0], 0) + 1)
    if mnemonic.startswith(("ds_", *_VECTOR_MEMORY)):
        loads = "_load" in mnemonic or "_read" in mnemonic
        named = [_registers(word) for word in instruction.operands]
        return Use("memory", tuple(named[1:] if loads else named), named[0] if loads and named else frozenset(), 1)
    if not mnemonic.startswith("v_"):
        return Use("other", (), frozenset(), 1)
    named = [_registers(word) for word in instruction.operands]
    if mnemonic.startswith("v_cmpx"):
        written, read = _EXEC | named[0], named[1:]
    elif _TWO_RESULTS.match(mnemonic):
        written, read = named[0] | named[1], named[2:]
    elif "_swap_" in mnemonic:
        written, read = named[0] | named[1], named
    else:
        written, read = named[0], named[1:]
    if _ACCUMULATE.match(mnemonic):
        read = [*read, named[0]]
    if mnemonic.startswith("v_div_fmas"):
        read = [*read, _VCC]
    kind = "mfma" if mnemonic.startswith(("v_mfma", "v_smfmac")) else "valu"
    return Use(kind, tuple(read), written, 1)


def _registers(word: str) -> frozenset[int]:
    try:
        return operands.parse(word.removeprefix("sext(").rstrip(")")).registers
    except UnknownInstruction:
        return frozenset()
