"""Scalar instructions that extract, sign-extend, pack, set, test and count bits, and that shift and add."""

from __future__ import annotations

import re

import numpy as np

from .compiling import Compiling, Step
from .operands import scalar_reader
from .scalar import put
from .state import State

u32, i64, u64 = np.uint32, np.int64, np.uint64


def compile_scalar_fields(c: Compiling) -> Step | None:
    return _fields(c) or _counts(c)


def _fields(c: Compiling) -> Step | None:
    if match := re.fullmatch(r"s_bfe_([iu])(32|64)", c.base):
        return _bit_field(c, signed=match[1] == "i", wide=match[2] == "64")
    if match := re.fullmatch(r"s_bfm_b(32)", c.base):
        first, second = (scalar_reader(operand, "u") for operand in c.operands[1:])
        write = put(c, c.operands[0])
        one, mask = u32(1), u32(31)
        return lambda state: write(state, ((one << (first(state) & mask)) - one) << (second(state) & mask))
    if match := re.fullmatch(r"s_pack_(l|h)(l|h)_b32_b16", c.base):
        first, second = (scalar_reader(operand, "u") for operand in c.operands[1:])
        low, high = (u32(16 * (half == "h")) for half in match.groups())
        write = put(c, c.operands[0])
        half, shift = u32(0xFFFF), u32(16)
        return lambda state: write(state, first(state) >> low & half | (second(state) >> high & half) << shift)
    if match := re.fullmatch(r"s_sext_i32_i(8|16)", c.base):
        read, write = scalar_reader(c.operands[1], "u"), put(c, c.operands[0])
        narrow = np.int8 if match[1] == "8" else np.int16
        return lambda state: write(state, read(state).astype(narrow).astype(np.int32).view(u32))
    if match := re.fullmatch(r"s_lshl([1-4])_add_u32", c.base):
        first, second = (scalar_reader(operand, "u") for operand in c.operands[1:])
        write, shift = put(c, c.operands[0]), u64(int(match[1]))

        def step(state: State) -> None:
            value = (first(state).astype(u64) << shift) + second(state)
            write(state, value.astype(u32))
            state.scc = np.broadcast_to(value > u64(0xFFFFFFFF), state.count)

        return step
    if match := re.fullmatch(r"s_bitset([01])_b32", c.base):
        read, write = scalar_reader(c.operands[1], "u"), put(c, c.operands[0])
        old = scalar_reader(c.operands[0], "u")

        def bitset(state: State) -> None:
            bit = u32(1) << (read(state) & u32(31))
            write(state, old(state) | bit if match[1] == "1" else old(state) & ~bit)

        return bitset
    if match := re.fullmatch(r"s_bitcmp([01])_b(32|64)", c.base):
        read = scalar_reader(c.operands[0], "U" if match[2] == "64" else "u")
        place, bits = scalar_reader(c.operands[1], "u"), int(match[2])

        def bitcmp(state: State) -> None:
            bit = read(state).astype(u64) >> (place(state) % u32(bits)).astype(u64) & u64(1)
            state.scc = np.broadcast_to(bit == int(match[1]), state.count)

        return bitcmp
    return None


def _bit_field(c: Compiling, *, signed: bool, wide: bool) -> Step:
    bits = 64 if wide else 32
    read, control = scalar_reader(c.operands[1], "U" if wide else "u"), scalar_reader(c.operands[2], "u")
    write = put(c, c.operands[0], wide=wide)

    def step(state: State) -> None:
        field = control(state)
        offset, width = (field & u32(bits - 1)).astype(u64), np.minimum(field >> u32(16) & u32(127), bits).astype(u64)
        value = read(state).astype(u64) >> offset
        nonempty = width > 0
        shift = np.where(nonempty, u64(64) - width, u64(0))
        # Sign-extend the field, which may be truncated at the end of the register.
        if signed:
            value = (value << shift).view(i64) >> shift.view(i64)
            value = value.view(u64)
        else:
            value = (value << shift) >> shift
        value = np.where(nonempty, value, u64(0)) & u64(2**bits - 1)
        write(state, value)
        state.scc = np.broadcast_to(value != 0, state.count)

    return step


def _counts(c: Compiling) -> Step | None:
    """s_bcnt0, s_bcnt1, s_ff1, s_ctz, s_flbit, s_clz and s_cls of a 32-bit or 64-bit value."""
    match = re.fullmatch(
        r"s_(bcnt[01]_i32|ff1_i32|ctz_i32|flbit_i32|cls_i32|clz_i32_u32|clz_i32_u64)(?:_b(32|64))?", c.base
    )
    if not match:
        return None
    # These instructions count the leading bits that equal the sign bit.
    signed = c.base in ("s_flbit_i32", "s_cls_i32")
    bits = 64 if match[2] == "64" or match[1].endswith("u64") else 32
    read, write = scalar_reader(c.operands[1], "U" if bits == 64 else "u"), put(c, c.operands[0])
    kind = match[1]

    def step(state: State) -> None:
        octets = np.ascontiguousarray(read(state)).view(np.uint8).reshape(-1, bits // 8)
        ones = np.unpackbits(octets, axis=1, bitorder="little").astype(bool)
        if signed:
            ones ^= ones[:, -1:]
        if kind.startswith("bcnt"):
            value = (ones if kind[4] == "1" else ~ones).sum(1)
            state.scc = np.broadcast_to(value != 0, state.count)
        else:
            ordered = ones if kind.startswith(("ff1", "ctz")) else ones[:, ::-1]
            value = np.where(ones.any(1), ordered.argmax(1), -1)
        write(state, value.astype(np.int64).astype(u32))

    return step
