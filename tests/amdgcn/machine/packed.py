"""Packed instructions of 16 and 32 bits, mixed precision, dot products, bitop3."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from . import floats
from .compiling import Compiling, Step
from .operands import Operand, Reader, vector_reader
from .state import State

u32, i32, i64, f32, f64, f16 = np.uint32, np.int32, np.int64, np.float32, np.float64, np.float16

_FLOAT32: dict[str, Callable[..., np.ndarray]] = {"add": np.add, "mul": np.multiply, "fma": floats.fma32}
_HALF: dict[str, tuple[str, Callable[..., np.ndarray]]] = {
    "v_pk_add_f16": ("h", np.add),
    "v_pk_mul_f16": ("h", np.multiply),
    "v_pk_fma_f16": ("h", floats.fma16),
    "v_pk_max_f16": ("h", np.fmax),
    "v_pk_min_f16": ("h", np.fmin),
    "v_pk_max_num_f16": ("h", np.fmax),
    "v_pk_min_num_f16": ("h", np.fmin),
    "v_pk_add_u16": ("w", np.add),
    "v_pk_sub_u16": ("w", np.subtract),
    "v_pk_add_i16": ("s", np.add),
    "v_pk_sub_i16": ("s", np.subtract),
    "v_pk_mul_lo_u16": ("w", np.multiply),
    "v_pk_mad_u16": ("w", lambda a, b, c: a * b + c),
    "v_pk_max_u16": ("w", np.maximum),
    "v_pk_min_u16": ("w", np.minimum),
    "v_pk_max_i16": ("s", np.maximum),
    "v_pk_min_i16": ("s", np.minimum),
    "v_pk_lshlrev_b16": ("w", lambda a, b: b << (a & np.uint16(15))),
    "v_pk_lshrrev_b16": ("w", lambda a, b: b >> (a & np.uint16(15))),
    "v_pk_ashrrev_i16": ("s", lambda a, b: b >> (a & np.int16(15))),
}


def compile_packed(c: Compiling) -> Step | None:
    for family in (_packed32, _packed16, _mixed, _bitop3, _dot):
        if step := family(c):
            return step
    return None


def negated(reader: Reader, negate: int) -> Reader:
    return (lambda state: np.negative(reader(state))) if negate else reader


def _packed32(c: Compiling) -> Step | None:
    match = re.fullmatch(r"v_pk_(add|mul|fma)_f32", c.base)
    if match:
        sources = c.operands[1:]
        low, high = _selections(c, len(sources), 1)
        minus = [c.take(name, (0,) * len(sources)) for name in ("neg_lo", "neg_hi")]
        function, register = _FLOAT32[match[1]], c.operands[0].register
        parts = [
            [negated(vector_reader(operand, "f", word=words[i]), signs[i]) for i, operand in enumerate(sources)]
            for words, signs in zip((low, high), minus, strict=True)
        ]

        def step(state: State) -> None:
            first, second = (function(*[reader(state) for reader in readers]) for readers in parts)
            state.put(register, first)
            state.put(register + 1, second)

        return step
    if c.base == "v_pk_mov_b32":
        words = c.take("op_sel", (0, 0))
        c.take("op_sel_hi")
        first, second = (vector_reader(operand, "u", word=words[i]) for i, operand in enumerate(c.operands[1:]))
        register = c.operands[0].register

        def move(state: State) -> None:
            low, high = np.array(first(state)), np.array(second(state))
            state.put(register, low)
            state.put(register + 1, high)

        return move
    return None


def _selections(c: Compiling, count: int, default: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return c.take("op_sel", (0,) * count), c.take("op_sel_hi", (default,) * count)


def _packed16(c: Compiling) -> Step | None:
    if c.base not in _HALF:
        return None
    letter, function = _HALF[c.base]
    sources, register = c.operands[1:], c.operands[0].register
    low, high = _selections(c, len(sources), 1)
    minus = [c.take(name, (0,) * len(sources)) for name in ("neg_lo", "neg_hi")]
    clamp = bool(c.take("clamp", False))
    if clamp and letter != "h":
        raise c.refuse("clamped integer results are not implemented")
    parts = [
        [negated(vector_reader(operand, letter, half=halves[i]), signs[i]) for i, operand in enumerate(sources)]
        for halves, signs in zip((low, high), minus, strict=True)
    ]

    def step(state: State) -> None:
        results = [function(*[reader(state) for reader in readers]) for readers in parts]
        if clamp:
            results = [np.clip(np.nan_to_num(result, nan=0.0), f16(0), f16(1)) for result in results]
        for half, result in enumerate(results):
            state.put_half(register, half, np.ascontiguousarray(result))

    return step


def _mixed(c: Compiling) -> Step | None:
    """v_fma_mix: every source is a float32 operand or, with op_sel_hi, the half of a register that op_sel selects."""
    match = re.fullmatch(r"v_fma_mix(lo|hi)?_(f32|f16)", c.base)
    if not match:
        return None
    half, is_half = _selections(c, 3, 0)
    clamp = bool(c.take("clamp", False))
    register = c.operands[0].register
    readers = [_mixed_source(operand, half[i], is_half[i]) for i, operand in enumerate(c.operands[1:])]
    function = floats.fma32 if match[2] == "f32" else floats.fma16

    def step(state: State) -> None:
        result = function(*[reader(state) for reader in readers])
        if clamp:
            result = np.clip(np.nan_to_num(result, nan=0.0), result.dtype.type(0), result.dtype.type(1))
        if match[1]:
            state.put_half(register, int(match[1] == "hi"), result)
        else:
            state.put(register, result)

    return step


def _mixed_source(operand: Operand, half: int, is_half: int) -> Reader:
    if not is_half:
        return vector_reader(operand, "f")
    read = vector_reader(operand, "h", half=half)
    return lambda state: read(state).astype(f32)


def _bitop3(c: Compiling) -> Step | None:
    """v_bitop3 computes any bitwise function of a, b and c: every bit of its result is bit 4a + 2b + c of a table.

    With 16 bits, op_sel selects the half of each source and, last, of the destination. The other half of the
    destination is unchanged, so that code that relies on zeros there fails.
    """
    if c.base not in ("v_bitop3_b32", "v_bitop3_b16"):
        return None
    short = c.base.endswith("b16")
    table = c.take("bitop3", 0)
    *halves, target = c.take("op_sel", (0, 0, 0, 0)) if short else (0, 0, 0, 0)
    letter, dtype = ("w", np.uint16) if short else ("u", u32)
    readers = [vector_reader(operand, letter, half=halves[i]) for i, operand in enumerate(c.operands[1:])]
    register = c.operands[0].register

    def step(state: State) -> None:
        values = [reader(state) for reader in readers]
        result = np.zeros((1, 1), dtype)
        for row in range(8):
            if table >> row & 1:
                bits = [value if row >> 2 - i & 1 else ~value for i, value in enumerate(values)]
                result = result | bits[0] & bits[1] & bits[2]
        if short:
            state.put_half(register, target, np.ascontiguousarray(result))
        else:
            state.put(register, result)

    return step


def _elements(value: np.ndarray, width: int, *, signed: bool) -> list[np.ndarray]:
    """Split a register into fields, as int64, lowest first."""
    fields = [(value >> u32(width * i) & u32((1 << width) - 1)).astype(i64) for i in range(32 // width)]
    if not signed:
        return fields
    return [field - ((field >> (width - 1)) << width) for field in fields]


def _dot(c: Compiling) -> Step | None:
    """v_dot4, v_dot8 and v_dot2: the products of two registers' fields, added to a third operand or the destination."""
    match = re.fullmatch(r"v_dot([48])(c?)_(i32|u32)_(iu8|i8|u8|iu4|i4|u4)", c.base)
    if match:
        return _integer_dot(c, accumulates=bool(match[2]), signed=match[3] == "i32", kind=match[4])
    match = re.fullmatch(r"v_dot2(c?)_f32_(f16|bf16)", c.base)
    if match:
        return _float_dot(c, accumulates=bool(match[1]), kind=match[2])
    match = re.fullmatch(r"v_dot4_f32_(fp8|bf8)_(fp8|bf8)", c.base)
    return _small_dot(c, *match.groups()) if match else None


def _addend(c: Compiling, accumulates: bool, letter: str) -> Reader:
    return vector_reader(c.operands[0] if accumulates else c.operands[3], letter)


def _integer_dot(c: Compiling, *, accumulates: bool, signed: bool, kind: str) -> Step:
    width = int(kind[-1])
    mixed = kind.startswith("iu")
    signs = c.take("neg_lo", (0, 0, 0)) if mixed else (signed, signed, signed)
    c.take("op_sel"), c.take("op_sel_hi")
    clamp = bool(c.take("clamp", False))
    first, second = (vector_reader(operand, "u") for operand in c.operands[1:3])
    addend, register = _addend(c, accumulates, "i" if signed else "u"), c.operands[0].register
    low, high = (-(2**31), 2**31 - 1) if signed else (0, 2**32 - 1)

    def step(state: State) -> None:
        a = _elements(first(state), width, signed=bool(signs[0]))
        b = _elements(second(state), width, signed=bool(signs[1]))
        total = sum((x * y for x, y in zip(a, b, strict=True)), addend(state).astype(i64))
        if clamp:
            total = np.clip(total, low, high)
        state.put(register, total.astype(u32))

    return step


def _float_dot(c: Compiling, *, accumulates: bool, kind: str) -> Step:
    if any(any(c.take(name, ())) for name in ("op_sel", "neg_lo", "neg_hi")):
        raise c.refuse("only plain dot products are implemented")
    c.take("op_sel_hi")
    sources = c.operands[1:3]
    addend, register = _addend(c, accumulates, "f"), c.operands[0].register
    readers = [[vector_reader(operand, "w", half=half) for half in (0, 1)] for operand in sources]

    def number(bits: np.ndarray) -> np.ndarray:
        value = bits.view(f16) if kind == "f16" else floats.from_bf16(bits.astype(u32))
        return value.astype(f64)

    def step(state: State) -> None:
        a, b = ([number(reader(state)) for reader in halves] for halves in readers)
        state.put(register, (a[0] * b[0] + a[1] * b[1] + addend(state)).astype(f32))

    return step


def _small_dot(c: Compiling, first_kind: str, second_kind: str) -> Step:
    if any(any(c.take(name, ())) for name in ("neg_lo", "neg_hi")):
        raise c.refuse("only plain dot products are implemented")
    first, second = (vector_reader(operand, "u") for operand in c.operands[1:3])
    addend, register = vector_reader(c.operands[3], "f"), c.operands[0].register
    left, right = floats.small(first_kind), floats.small(second_kind)

    def step(state: State) -> None:
        a = _elements(first(state), 8, signed=False)
        b = _elements(second(state), 8, signed=False)
        products = (left.decode(x).astype(f64) * right.decode(y) for x, y in zip(a, b, strict=True))
        state.put(register, sum(products, addend(state).astype(f64)).astype(f32))

    return step
