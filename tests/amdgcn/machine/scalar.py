"""Scalar instructions: one value per wave, in arrays over the waves of a batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .compiling import Compiling, Step
from .operands import DTYPES, EXEC, Operand, scalar_reader
from .state import State

u32, i64, u64 = np.uint32, np.int64, np.uint64

_NO_EFFECT = re.compile(
    r"s_(nop|delay_alu|waitcnt_depctr|wait_alu|wait_event|clause|sendmsg|sleep|setprio|inst_prefetch|"
    r"set_inst_prefetch_distance|code_end|icache_inv|dcache_inv|dcache_wb|ttracedata_imm)"
)


def _overflows(value: np.ndarray) -> np.ndarray:
    return (value < -(2**31)) | (value > 2**31 - 1)


def _reversed_bits(value: np.ndarray) -> np.ndarray:
    size = value.dtype.itemsize
    octets = np.ascontiguousarray(value).view(np.uint8).reshape(-1, size)
    bits = np.unpackbits(octets, axis=1, bitorder="little")[:, ::-1]
    return np.packbits(bits, axis=1, bitorder="little").view(value.dtype)[:, 0]


def _shift(kind: str, value: np.ndarray, amount: np.ndarray) -> np.ndarray:
    bits = value.dtype.itemsize * 8
    count = (amount & amount.dtype.type(bits - 1)).astype(value.dtype)
    if kind == "lshl":
        return value << count
    if kind == "lshr":
        return value >> count
    signed = np.int64 if bits == 64 else np.int32
    return (value.view(signed) >> count.view(signed)).view(value.dtype)


# Bitwise operations: name -> function of one or two sources. SCC is set if the result is not zero.
BITWISE: dict[str, Callable[..., np.ndarray]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
    "andn2": lambda a, b: a & ~b,
    "and_not1": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "or_not1": lambda a, b: a | ~b,
    "not": lambda a: ~a,
    "lshl": lambda a, b: _shift("lshl", a, b),
    "lshr": lambda a, b: _shift("lshr", a, b),
    "ashr": lambda a, b: _shift("ashr", a, b),
}

# Integer arithmetic, computed in int64: name -> (function, what SCC becomes, or None if it does not change).
_CARRY = "carry"
_OVERFLOW = "overflow"
INTEGER: dict[str, tuple[Callable[..., np.ndarray], str | None]] = {
    "s_add_u32": (lambda a, b, carry: a + b, _CARRY),
    "s_addc_u32": (lambda a, b, carry: a + b + carry, _CARRY),
    "s_sub_u32": (lambda a, b, carry: a - b, _CARRY),
    "s_subb_u32": (lambda a, b, carry: a - b - carry, _CARRY),
    "s_add_i32": (lambda a, b, carry: a + b, _OVERFLOW),
    "s_sub_i32": (lambda a, b, carry: a - b, _OVERFLOW),
    "s_mul_i32": (lambda a, b, carry: a * b, None),
    "s_mul_hi_i32": (lambda a, b, carry: a * b >> 32, None),
    "s_mul_hi_u32": (lambda a, b, carry: (a.view(u64) * b.view(u64) >> u64(32)).view(i64), None),
}
_RENAMED = {
    "s_add_co_u32": "s_add_u32",
    "s_add_co_ci_u32": "s_addc_u32",
    "s_sub_co_u32": "s_sub_u32",
    "s_sub_co_ci_u32": "s_subb_u32",
    "s_add_co_i32": "s_add_i32",
    "s_sub_co_i32": "s_sub_i32",
    "s_addk_co_i32": "s_addk_i32",
}

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: (a < b) | (a > b),
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
}


def put(c: Compiling, operand: Operand, *, wide: bool = False) -> Callable[[State, np.ndarray], None]:
    """Return a function that writes a scalar destination. wide: 64 bits."""
    register = operand.register
    if operand.kind == "none":
        return lambda state, value: None
    if operand.kind != "s":
        raise c.refuse(f"{operand.text!r} is not a scalar destination")
    if wide:
        return lambda state, value: state.put_scalar_pair(register, value)
    return lambda state, value: state.put_scalar(register, value)


def compile_scalar(c: Compiling) -> Step | None:
    if _NO_EFFECT.fullmatch(c.base):
        return lambda state: None
    for family in (_bitwise, _moves, _integer, _integer64, _extremes, _immediates, _saveexec, _compare):
        if step := family(c):
            return step
    return None


def _bitwise(c: Compiling) -> Step | None:
    match = re.fullmatch(r"s_(\w+?)_[bi](32|64)", c.base)
    if not match or match[1] not in BITWISE:
        return None
    function, wide = BITWISE[match[1]], match[2] == "64"
    letter = "U" if wide else "u"
    readers = [scalar_reader(operand, letter) for operand in c.operands[1:]]
    if "sh" in match[1]:
        readers[1] = scalar_reader(c.operands[2], "u")
    write = put(c, c.operands[0], wide=wide)

    def step(state: State) -> None:
        value = function(*(reader(state) for reader in readers))
        write(state, value)
        state.scc = np.broadcast_to(value != 0, state.count)

    return step


def _moves(c: Compiling) -> Step | None:
    match = re.fullmatch(r"s_(mov|cmov|cselect|brev)_b(32|64)", c.base)
    if not match:
        return None
    wide = match[2] == "64"
    letter = "U" if wide else "u"
    write = put(c, c.operands[0], wide=wide)
    readers = [scalar_reader(operand, letter) for operand in c.operands[1:]]
    first = readers[0]
    if match[1] == "mov":
        return lambda state: write(state, first(state))
    if match[1] == "brev":
        return lambda state: write(state, _reversed_bits(first(state)))
    other = readers[1] if match[1] == "cselect" else scalar_reader(c.operands[0], letter)
    return lambda state: write(state, np.where(state.scc, first(state), other(state)))


def _integer(c: Compiling) -> Step | None:
    name = _RENAMED.get(c.base, c.base)
    if name not in INTEGER:
        return None
    function, scc = INTEGER[name]
    letter = "i" if name.endswith("i32") else "u"
    first, second = (scalar_reader(operand, letter) for operand in c.operands[1:])
    write = put(c, c.operands[0])

    def step(state: State) -> None:
        value = function(first(state).astype(i64), second(state).astype(i64), state.scc)
        write(state, value.astype(u32))
        if scc is _CARRY:
            state.scc = np.broadcast_to((value < 0) | (value > 0xFFFFFFFF), state.count)
        elif scc is _OVERFLOW:
            state.scc = np.broadcast_to(_overflows(value), state.count)

    return step


def _integer64(c: Compiling) -> Step | None:
    functions = {"s_add_nc_u64": np.add, "s_sub_nc_u64": np.subtract, "s_mul_u64": np.multiply}
    if c.base not in functions:
        return None
    function = functions[c.base]
    first, second = (scalar_reader(operand, "U") for operand in c.operands[1:])
    write = put(c, c.operands[0], wide=True)
    return lambda state: write(state, function(first(state), second(state)))


def _extremes(c: Compiling) -> Step | None:
    match = re.fullmatch(r"s_(min|max)_([iu])32", c.base)
    if match:
        function = np.minimum if match[1] == "min" else np.maximum
        first, second = (scalar_reader(operand, match[2]) for operand in c.operands[1:])
        write = put(c, c.operands[0])

        def step(state: State) -> None:
            a = first(state)
            value = function(a, second(state))
            write(state, value.view(u32))
            state.scc = np.broadcast_to(value == a, state.count)

        return step
    if c.base == "s_abs_i32":
        read, store = scalar_reader(c.operands[1], "i"), put(c, c.operands[0])

        def absolute(state: State) -> None:
            value = np.abs(read(state))
            store(state, value.view(u32))
            state.scc = np.broadcast_to(value != 0, state.count)

        return absolute
    return None


def _immediates(c: Compiling) -> Step | None:
    match = re.fullmatch(r"s_(mov|add|mul|cmov)k_i32", _RENAMED.get(c.base, c.base))
    if not match:
        return None
    number = np.array([c.operands[1].value & 0xFFFF], np.uint16).view(np.int16).astype(i64)
    write, old = put(c, c.operands[0]), scalar_reader(c.operands[0], "i")
    if match[1] == "mov":
        return lambda state: write(state, number.astype(u32))
    if match[1] == "mul":
        return lambda state: write(state, (old(state).astype(i64) * number).astype(u32))
    if match[1] == "cmov":
        return lambda state: write(state, np.where(state.scc, number, old(state)).astype(u32))

    def add(state: State) -> None:
        value = old(state).astype(i64) + number
        write(state, value.astype(u32))
        state.scc = _overflows(value)

    return add


def _saveexec(c: Compiling) -> Step | None:
    match = re.fullmatch(r"s_(\w+)_saveexec_b(32|64)", c.base)
    if not match or match[1] not in BITWISE:
        return None
    if int(match[2]) != c.target.lanes:
        raise c.refuse("EXEC has a different width")
    wide = match[2] == "64"
    function, letter = BITWISE[match[1]], "U" if wide else "u"
    read, write = scalar_reader(c.operands[1], letter), put(c, c.operands[0], wide=wide)

    def step(state: State) -> None:
        before = state.scalar_pair(EXEC) if wide else state.s[EXEC].copy()
        after = np.broadcast_to(function(read(state), before), state.count)
        write(state, before)
        if wide:
            state.put_scalar_pair(EXEC, after)
        else:
            state.put_scalar(EXEC, after)
        state.scc = after != 0

    return step


def _compare(c: Compiling) -> Step | None:
    match = re.fullmatch(r"s_cmp(k?)_(\w+)_([uif])(32|64)", c.base)
    if not match or match[2] not in COMPARE or (match[3] == "f" and not c.target.scalar_float):
        return None
    function = COMPARE[match[2]]
    letter = match[3].upper() if match[4] == "64" else match[3]
    first, second = (scalar_reader(operand, letter) for operand in c.operands)
    if match[1]:
        bits = c.operands[1].value & 0xFFFF
        fixed = np.array([bits - (bits >> 15 << 16) if letter == "i" else bits], i64).astype(DTYPES[letter])
        second = lambda state: fixed  # noqa: E731 - a reader like the other

    def step(state: State) -> None:
        state.scc = np.broadcast_to(function(first(state), second(state)), state.count)

    return step
