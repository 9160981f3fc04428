"""Matrix instructions: MFMA (CDNA) and WMMA (RDNA), D = A × B + C.

A lane holds elements of one row of A and of one column of B. The group of the lane, lane // size, determines their
indices along K. Their order is the same in A and B, so the product does not depend on it. Floats are summed in
float64 and rounded once, because the hardware's order of summation is not documented. EXEC is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import eight_bit, floats
from .compiling import Compiling, Step
from .errors import MachineError
from .operands import Operand, vector_reader
from .state import State

u32, i64, f32, f64 = np.uint32, np.int64, np.float32, np.float64

_MFMA = re.compile(r"v_mfma_(f32|i32)_(\d+)x(\d+)x(\d+)_?(\w+?)(?:_1k)?")
_WMMA = re.compile(r"v_wmma_(f32|i32)_16x16x(16|32)_(\w+)")


@dataclass(frozen=True)
class Shape:
    """The shape of a matrix instruction. size: rows of A and columns of B. depth: K. groups: number of lane groups with
    different indices along K; 1 if all groups hold the same elements (RDNA 3)."""

    size: int
    depth: int
    groups: int
    lanes: int
    layout: str

    @property
    def per_lane(self) -> int:
        return self.depth // self.groups

    @property
    def results(self) -> int:
        """The number of registers of C, which is also that of D."""
        return self.size * self.size // self.lanes

    def rows(self, elements: np.ndarray, waves: int) -> np.ndarray:
        """Rearrange [waves, lanes, elements per lane] into the matrix [waves, size, depth]."""
        if self.groups == 1 and self.lanes != self.size:
            halves = elements.reshape(waves, -1, self.size, self.per_lane)
            if not np.array_equal(halves[:, 0], halves[:, 1], equal_nan=elements.dtype == f64):
                raise MachineError("the two halves of a wave hold different elements of A or B")
            return halves[:, 0]
        grouped = elements.reshape(waves, self.groups, self.size, self.per_lane)
        return grouped.transpose(0, 2, 1, 3).reshape(waves, self.size, self.depth)

    def results_of(self, product: np.ndarray) -> np.ndarray:
        """Rearrange [waves, size, size] into registers [results, waves, lanes]."""
        waves, n = len(product), self.size
        if self.layout == "mfma32":
            # Register 4 q + t holds row 8 q + 4 (lane / 32) + t.
            parts = product.reshape(waves, 4, 2, 4, n).transpose(1, 3, 0, 2, 4)
        elif self.layout == "interleaved":
            # Register r holds row 2 r + lane / 16.
            parts = product.reshape(waves, n // 2, 2, n).transpose(1, 0, 2, 3)
        else:
            # Register r holds row results * (lane / n) + r.
            groups = self.lanes // n
            parts = product.reshape(waves, groups, n // groups, n).transpose(2, 0, 1, 3)
        return parts.reshape(self.results, waves, self.lanes)


Decoder = Callable[[np.ndarray], np.ndarray]


def compile_matrix(c: Compiling) -> Step | None:
    if c.target.cdna and (match := _MFMA.fullmatch(c.base)):
        result, size, other, depth, kind = match.groups()
        if size != other or size not in ("16", "32"):
            return None
        groups = c.target.lanes // int(size)
        layout = "mfma32" if size == "32" else "grouped"
        return _product(c, Shape(int(size), int(depth), groups, 64, layout), result, kind)
    if not c.target.cdna and (match := _WMMA.fullmatch(c.base)):
        result, depth, kind = match.groups()
        old = c.target.generation == 11
        shape = Shape(16, int(depth), 1 if old else 2, 32, "interleaved" if old else "grouped")
        return _product(c, shape, result, kind)
    return None


def _product(c: Compiling, shape: Shape, result: str, kind: str) -> Step | None:
    formats = _formats(c, kind)
    if formats is None:
        return None
    target, left, right, addend = c.operands
    integer = result == "i32"
    clamp = bool(c.take("clamp", False))
    for name in ("cbsz", "abid", "blgp", "op_sel"):
        if c.has(name) and np.any(c.take(name)):
            raise c.refuse(f"{name} is not implemented")
    readers = [_matrix_reader(shape, *format, integer) for format in formats]
    first, second = target.register, target.register + shape.results
    add = _addend(c, addend, shape, integer)
    flush = c.target.flushes_matrix and kind in ("f16", "bf16")

    def step(state: State) -> None:
        a = readers[0](state, left)
        b = readers[1](state, right)
        product = shape.results_of(a @ b.transpose(0, 2, 1))
        if integer:
            total = product.astype(i64) + add(state)
            if clamp:
                total = np.clip(total, -(2**31), 2**31 - 1)
            state.v[first:second] = total.astype(u32)
            return
        total = (product + add(state)).astype(f32)
        state.vf[first:second] = floats.flush32(total) if flush else total

    return step


def _addend(c: Compiling, operand: Operand, shape: Shape, integer: bool) -> Callable[[State], Any]:
    if operand.kind == "v":
        first, last = operand.register, operand.register + shape.results
        if integer:
            return lambda state: state.vi[first:last].astype(i64)
        return lambda state: state.vf[first:last]
    return vector_reader(operand, "i" if integer else "f")


def _formats(c: Compiling, kind: str) -> list[tuple[int, Decoder]] | None:
    """For A and for B, the number of bits of an element and a function that decodes it; None for an unknown kind."""
    signs = c.take("neg_lo", (0, 0, 0))
    if any(c.take("neg_hi", ())) or (any(signs) and not kind.startswith("iu")):
        raise c.refuse("negation is not implemented")
    if kind in ("bf16", "f16"):
        return [(16, _float16_or_bf16(kind, c.target.flushes_matrix))] * 2
    if kind in ("f32", "xf32"):
        return [(32, _xf32 if kind == "xf32" else _float32)] * 2
    if kind == "i8" and c.target.cdna:
        return [(8, _integer(8, True))] * 2
    if kind in ("iu8", "iu4") and not c.target.cdna:
        bits = int(kind[2])
        return [(bits, _integer(bits, bool(sign))) for sign in signs[:2]]
    names = kind.split("_")
    if len(names) == 2 and set(names) <= {"fp8", "bf8"} and c.target.eight_bit:
        return [(8, eight_bit.small(c.target, name).decode) for name in names]
    if kind == "f8f6f4" and c.target.name == "gfx950":
        order = ("fp8", "bf8", "fp6", "bf6", "fp4")
        chosen = [floats.small(order[c.take(name, 0)]) for name in ("cbsz", "blgp")]
        return [(format.bits, format.decode) for format in chosen]
    return None


def _float16_or_bf16(kind: str, flushes: bool) -> Decoder:
    if kind == "bf16":
        return lambda codes: _flushed(floats.from_bf16(codes.astype(u32)), flushes, 2.0**-126)
    return lambda codes: _flushed(codes.astype(np.uint16).view(np.float16).astype(f32), flushes, 2.0**-14)


def _flushed(value: np.ndarray, flushes: bool, smallest_normal: float) -> np.ndarray:
    return np.where(np.abs(value) < smallest_normal, f32(0), value) if flushes else value


def _float32(codes: np.ndarray) -> np.ndarray:
    return codes.view(f32)


def _xf32(codes: np.ndarray) -> np.ndarray:
    """Round float32 to xf32, whose mantissa has 10 bits."""
    rounded = codes + u32(0xFFF) + (codes >> u32(13) & u32(1))
    return np.where(codes & u32(0x7F800000) == u32(0x7F800000), codes, rounded & ~u32(0x1FFF)).view(f32)


def _integer(bits: int, signed: bool) -> Decoder:
    def decode(codes: np.ndarray) -> np.ndarray:
        value = codes.astype(i64)
        return value - ((value >> (bits - 1)) << bits) if signed else value

    return decode


def _matrix_reader(shape: Shape, bits: int, decode: Decoder, integer: bool) -> Callable[[State, Operand], np.ndarray]:
    registers = shape.per_lane * bits // 32
    dtype = i64 if integer else f64

    def read(state: State, operand: Operand) -> np.ndarray:
        if operand.kind != "v":
            raise MachineError("a matrix must be in vector registers")
        if operand.count < registers:
            raise MachineError(f"{operand.text} has fewer than {registers} registers")
        words = state.v[operand.register : operand.register + registers].transpose(1, 2, 0)
        codes = fields(np.ascontiguousarray(words), bits, shape.per_lane)
        return shape.rows(decode(codes).astype(dtype), state.count)

    return read


def fields(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Split every lane's registers into fields of `bits` bits, lowest first. Returns the first `count` fields:
    [waves, lanes, count]."""
    if bits == 32:
        return words
    if bits in (8, 16):
        return words.view(np.uint8 if bits == 8 else np.uint16)
    unpacked = np.unpackbits(words.view(np.uint8), axis=2, bitorder="little")
    split = unpacked[:, :, : bits * count].reshape(*words.shape[:2], count, bits)
    return (split.astype(np.uint8) << np.arange(bits, dtype=np.uint8)).sum(3, dtype=np.uint8)
