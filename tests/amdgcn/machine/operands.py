"""Operands: parsing the text of an operand, and functions that read it from a batch of waves.

A reader takes the state and returns an array that broadcasts to [waves, lanes] (scalar readers: to [waves]), viewed as
the instruction's type. Constants are arrays of one element, so that integer overflow wraps silently.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from .errors import UnknownInstruction

Reader = Callable[[Any], np.ndarray]

VCC, M0, EXEC, TTMP = 106, 124, 126, 108
# The index of the first accumulation register among the vector registers.
ACC = 256
# The index of the first SGPR in sets of vector and scalar registers.
SCALAR = 1000

_NAMED = {
    "vcc": (VCC, 2),
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "exec": (EXEC, 2),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
    "m0": (M0, 1),
}
_SINGLE = re.compile(r"([vsa])(\d+)")
_RANGE = re.compile(r"([vsa])\[(\d+):(\d+)\]")
_NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")

# Type letters of sources: u, i, f (unsigned, signed and float) for 32 bits; w, s, h for 16 bits; U, I, D for 64 bits.
DTYPES = {
    "u": np.uint32,
    "i": np.int32,
    "f": np.float32,
    "w": np.uint16,
    "s": np.int16,
    "h": np.float16,
    "U": np.uint64,
    "I": np.int64,
    "D": np.float64,
}


@dataclass(frozen=True)
class Operand:
    """One operand. kind: "v" (vector and accumulation registers), "s" (scalar), "constant", "none" (null, off) or
    "scc"."""

    text: str
    kind: str
    register: int = 0
    count: int = 1
    # An integer constant, or the bits of a floating-point constant as a float32.
    value: int = 0
    # The value of a floating-point constant.
    number: float | None = None
    negate: bool = False
    absolute: bool = False

    @property
    def registers(self) -> frozenset[int]:
        if self.kind not in ("v", "s"):
            return frozenset()
        start = self.register + (SCALAR if self.kind == "s" else 0)
        return frozenset(range(start, start + self.count))


@cache
def parse(text: str) -> Operand:
    """Parse one operand. Raises `UnknownInstruction` for any other text, such as a label."""
    bare, negate, absolute = text, False, False
    if bare.startswith("-") and not bare[1:2].isdigit():
        bare, negate = bare[1:], True
    if bare.startswith("|"):
        bare, absolute = bare.strip("|"), True
    modified = {"negate": negate, "absolute": absolute}
    if match := _SINGLE.fullmatch(bare):
        return _register(text, match[1], int(match[2]), 1, modified)
    if match := _RANGE.fullmatch(bare):
        first, last = int(match[2]), int(match[3])
        return _register(text, match[1], first, last - first + 1, modified)
    if match := re.fullmatch(r"ttmp(\d+)", bare):
        return Operand(text, "s", TTMP + int(match[1]), **modified)
    if bare in _NAMED:
        return Operand(text, "s", *_NAMED[bare], **modified)
    if bare in ("null", "off"):
        return Operand(text, "none")
    if bare in ("scc", "src_scc"):
        return Operand(text, "scc", **modified)
    if match := re.fullmatch(r"lit(?:64)?\((.+)\)", bare):
        bare = match[1]
    if _NUMBER.fullmatch(bare):
        number = float(bare)
        bits = struct.unpack("<I", struct.pack("<f", number))[0]
        return Operand(text, "constant", value=bits, number=number, **modified)
    try:
        return Operand(text, "constant", value=int(bare, 0), **modified)
    except ValueError:
        raise UnknownInstruction(f"operand {text!r}") from None


def _register(text: str, kind: str, first: int, count: int, modified: dict[str, bool]) -> Operand:
    if kind == "a":
        return Operand(text, "v", ACC + first, count, **modified)
    return Operand(text, kind, first, count, **modified)


def constant(operand: Operand, letter: str) -> np.ndarray:
    """A constant operand as an array of one element. A floating-point constant is converted to `letter`'s type if that
    is a floating-point type."""
    if letter == "h" and operand.number is not None:
        return np.array([operand.number], np.float16)
    if letter == "D":
        bits = operand.value << 32 & 0xFFFFFFFFFFFFFFFF
        value = np.array([bits], np.uint64).view(np.float64)
        return np.array([operand.number]) if operand.number is not None else value
    if letter in "UI":
        return np.array([operand.value & 0xFFFFFFFFFFFFFFFF], np.uint64).view(DTYPES[letter])
    if letter in "wsh":
        return np.array([operand.value & 0xFFFF], np.uint16).view(DTYPES[letter])
    return np.array([operand.value & 0xFFFFFFFF], np.uint32).view(DTYPES[letter])


def bare(operand: Operand) -> Operand:
    """The operand without its sign modifiers."""
    return replace(operand, negate=False, absolute=False)


def vector_reader(operand: Operand, letter: str, *, word: int = 0, half: int = 0) -> Reader:
    """Return a reader of an operand per lane, with its sign modifiers. word: index of the register. half: index of the
    16-bit half."""
    reader = _plain_vector_reader(operand, letter, word, half)
    return with_signs(reader, operand, letter)


def with_signs(reader: Reader, operand: Operand, letter: str) -> Reader:
    """Apply `|x|` and `-x` to the result of a reader. With the type u, they change the sign bit of a float, as in
    v_cndmask."""
    if not (operand.negate or operand.absolute):
        return reader
    negate, absolute = operand.negate, operand.absolute

    def signed(state: Any) -> np.ndarray:
        value = reader(state)
        if letter == "u":
            value = value & np.uint32(0x7FFFFFFF) if absolute else value
            return value ^ np.uint32(0x80000000) if negate else value
        value = np.abs(value) if absolute else value
        return np.negative(value) if negate else value

    return signed


def _plain_vector_reader(operand: Operand, letter: str, word: int, half: int) -> Reader:
    index, dtype = operand.register + word, DTYPES[letter]
    if operand.kind == "v":
        if letter == "u":
            return lambda state: state.v[index]
        if letter == "f":
            return lambda state: state.vf[index]
        if letter == "i":
            return lambda state: state.vi[index]
        if letter in "wsh":
            return lambda state: state.halves(index, half).view(dtype)
        return lambda state: state.pair(index).view(dtype)
    if operand.kind == "constant":
        if letter in "uif" and word:
            value = np.array([operand.value >> 32 & 0xFFFFFFFF if operand.number is None else 0], np.uint32)
            fixed = value.view(dtype)
        else:
            fixed = constant(operand, letter)
            if letter in "wsh" and half:
                high = 0 if operand.number is not None else operand.value >> 16 & 0xFFFF
                fixed = np.array([high], np.uint16).view(dtype)
        fixed = fixed[:, None]
        return lambda state: fixed
    scalar = scalar_reader(bare(operand), "U" if letter in "UID" else "u", word=word)
    if letter in "UID":
        return lambda state: scalar(state)[:, None].view(dtype)
    if letter in "wsh":
        shift = np.uint32(16 * half)
        return lambda state: (scalar(state)[:, None] >> shift).astype(np.uint16).view(dtype)
    return lambda state: scalar(state)[:, None].view(dtype)


def scalar_reader(operand: Operand, letter: str, *, word: int = 0) -> Reader:
    """Return a reader of an operand per wave. letter: u, i and f for 32 bits, U and I for 64."""
    index, dtype = operand.register + word, DTYPES[letter]
    if operand.kind == "s":
        if letter in "UI":
            # One 32-bit register as a 64-bit operand, such as exec_lo with 32 lanes.
            if operand.count == 1:
                return lambda state: state.s[index].astype(np.uint64).view(dtype)
            return lambda state: state.scalar_pair(index).view(dtype)
        return with_signs(lambda state: state.s[index].view(dtype), operand, letter)
    if operand.kind == "constant":
        fixed = constant(operand, letter)
        return with_signs(lambda state: fixed, operand, letter)
    if operand.kind == "none":
        zero = np.zeros(1, dtype)
        return lambda state: zero
    if operand.kind == "scc":
        return lambda state: state.scc.astype(dtype)
    raise UnknownInstruction(f"{operand.text!r} is not a scalar operand")
