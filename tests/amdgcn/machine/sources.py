"""The sources and the destination of a vector instruction with their modifiers: DPP, SDWA, op_sel and signs."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from . import operands
from .compiling import Compiling
from .lanes import Dpp
from .operands import DTYPES, Operand, Reader, vector_reader, with_signs
from .state import State

u32 = np.uint32

_SELECT = (
    {"DWORD": (0, 32)} | {f"WORD_{i}": (16 * i, 16) for i in range(2)} | {f"BYTE_{i}": (8 * i, 8) for i in range(4)}
)
_SEXT = re.compile(r"sext\((.+)\)")


class Sources:
    """Readers of a vector instruction's sources.

    letters: the types of the sources. `written` returns the lanes that the instruction writes, as a ufunc's `where=`
    argument.
    """

    def __init__(self, c: Compiling, texts: list[str], letters: str) -> None:
        self.dpp = Dpp(c) if c.dpp else None
        select = [c.take(f"src{i}_sel", "DWORD") for i in range(2)] if c.sdwa else []
        halves = c.take("op_sel", ()) if any(letter in "wsh" for letter in letters) else ()
        self.target_half = halves[len(letters)] if len(halves) > len(letters) else 0
        self.operands: list[Operand] = []
        self.readers: list[Reader] = []
        for i, (text, letter) in enumerate(zip(texts, letters, strict=True)):
            sext = _SEXT.fullmatch(text)
            operand = operands.parse(sext[1] if sext else text)
            self.operands.append(operand)
            if self.dpp and i == 0:
                self.readers.append(_moved(self.dpp, operand, letter))
            elif c.sdwa and i < 2:
                self.readers.append(_selected(operand, letter, *_SELECT[select[i]], signed=bool(sext)))
            else:
                half = halves[i] if i < len(halves) and letter in "wsh" else 0
                self.readers.append(vector_reader(operand, letter, half=half))

    def __call__(self, state: State) -> list[np.ndarray]:
        return [reader(state) for reader in self.readers]

    @property
    def plain(self) -> bool:
        return self.dpp is None

    def written(self, state: State) -> Any:
        return state.where if self.dpp is None else self.dpp.written(state)


def _narrowed(bits: np.ndarray, letter: str) -> np.ndarray:
    if letter in "wsh":
        return bits.astype(np.uint16).view(DTYPES[letter])
    return bits.view(DTYPES[letter])


def _moved(dpp: Dpp, operand: Operand, letter: str) -> Reader:
    bits = vector_reader(operands.bare(operand), "u")
    return with_signs(lambda state: _narrowed(dpp.move(state, bits(state)), letter), operand, letter)


def _selected(operand: Operand, letter: str, shift: int, width: int, *, signed: bool) -> Reader:
    bits = vector_reader(operands.bare(operand), "u")
    up, down = u32(32 - shift - width), u32(32 - width)

    def read(state: State) -> np.ndarray:
        value = bits(state)
        if width < 32:
            value = value << up
            value = (value.view(np.int32) >> down.astype(np.int32)).view(u32) if signed else value >> down
        return _narrowed(value, letter)

    return with_signs(read, operand, letter)


# Unsigned integer instructions with clamp: on overflow, the result is the largest number or 0.
SATURATING: dict[str, Any] = {
    **dict.fromkeys(("v_add_u32", "v_add_nc_u32"), lambda a, b: a + np.minimum(b, ~a)),
    **dict.fromkeys(("v_sub_u32", "v_sub_nc_u32"), lambda a, b: a - np.minimum(a, b)),
}


class Destination:
    """The vector register that an instruction writes, with the modifiers of the result.

    letter: the result's type. A 16-bit result leaves the other half of the register unchanged on RDNA, with
    `preserves`, or if it is written to the upper half; otherwise it clears the other half.
    """

    def __init__(self, c: Compiling, operand: Operand, letter: str, sources: Sources, *, preserves: bool) -> None:
        if operand.kind != "v":
            raise c.refuse(f"{operand.text!r} is not a vector register")
        self.register, self.letter, self.sources = operand.register, letter, sources
        self.half = sources.target_half
        self.preserves = preserves or bool(self.half) or not c.target.cdna
        self.clamp = bool(c.take("clamp", False))
        multiplied, divided = c.take("mul", 1), c.take("div", 1)
        self.scale = DTYPES[letter](multiplied / divided) if letter in "fh" else None
        if self.clamp and letter not in "fh":
            if c.base not in SATURATING:
                raise c.refuse("clamped integer results are not implemented")
            self.clamp = False
        self.part = _SELECT[c.take("dst_sel", "DWORD")] if c.sdwa else (0, 32)
        self.unused = c.take("dst_unused", "UNUSED_PAD") if c.sdwa else ""

    @property
    def plain(self) -> bool:
        scaled = self.scale is not None and self.scale != 1
        return self.letter in "uif" and self.sources.plain and not (self.clamp or scaled or self.part != (0, 32))

    def put(self, state: State, value: np.ndarray) -> None:
        if self.scale is not None and self.scale != 1:
            value = value * self.scale
        if self.clamp:
            value = np.clip(np.nan_to_num(value, nan=0.0), value.dtype.type(0), value.dtype.type(1))
        where = self.sources.written(state)
        if self.letter in "wsh":
            bits = np.ascontiguousarray(value).view(np.uint16)
            if self.preserves and self.part == (0, 32):
                np.copyto(state.halves(self.register, self.half), bits, where=where)
                return
            bits = bits.astype(u32)
        else:
            bits = value.view(u32)
        if self.part != (0, 32):
            bits = self._placed(state, bits)
        np.copyto(state.v[self.register], bits, where=where)

    def _placed(self, state: State, bits: np.ndarray) -> np.ndarray:
        shift, width = self.part
        mask = u32((1 << width) - 1 << shift)
        placed = bits << u32(shift) & mask
        if self.unused == "UNUSED_PRESERVE":
            return placed | state.v[self.register] & ~mask
        if self.unused == "UNUSED_SEXT":
            up = u32(32 - shift - width)
            extended = ((placed << up).view(np.int32) >> np.int32(32 - shift - width)).view(u32)
            return extended & ~u32((1 << shift) - 1)
        return placed
