"""64-bit vector instructions, instructions with a carry, and the steps of a float32 division."""

from __future__ import annotations

import re

import numpy as np

from . import floats
from .compare import mask_reader, mask_writer
from .compiling import Compiling, Step
from .eight_bit import whole_register
from .operands import VCC, Operand, vector_reader
from .sources import Sources
from .state import State

u32, i32, u64, i64, f32, f64 = np.uint32, np.int32, np.uint64, np.int64, np.float32, np.float64


def compile_wide(c: Compiling) -> Step | None:
    for family in (_carry, _multiply_add, _shift, _division):
        if step := family(c):
            return step
    return None


def _carry(c: Compiling) -> Step | None:
    match = re.fullmatch(r"v_(add|sub|subrev|addc|subb|subbrev)_co(_ci)?_u32", c.base)
    if not match:
        return None
    kind, with_carry = match[1], bool(match[2]) or match[1] in ("addc", "subb", "subbrev")
    register, write = c.operands[0].register, mask_writer(c, c.operands[1])
    first, second = Sources(c, list(c.instruction.operands[2:4]), "uu").readers
    if c.sdwa:
        whole_register(c)
    if "rev" in kind:
        first, second = second, first
    carry = mask_reader(c, c.operands[4]) if with_carry else None

    def add(state: State) -> None:
        a = first(state)
        total = a + second(state)
        carry_out = total < a
        if carry:
            total = total + carry(state)
            carry_out = carry_out | (total == 0) & carry(state)
        total, carry_out = np.broadcast_to(total, state.x.shape), np.broadcast_to(carry_out, state.x.shape)
        write(state, carry_out)
        state.put(register, total)

    def subtract(state: State) -> None:
        a, b = first(state), second(state)
        total, borrow = a - b, a < b
        if carry:
            borrow = borrow | (total == 0) & carry(state)
            total = total - carry(state)
        total, borrow = np.broadcast_to(total, state.x.shape), np.broadcast_to(borrow, state.x.shape)
        write(state, borrow)
        state.put(register, total)

    return add if kind.startswith("add") else subtract


def _multiply_add(c: Compiling) -> Step | None:
    """{carry, d} = a × b + c with a 64-bit sum."""
    match = re.fullmatch(r"v_mad_(?:co_)?(u64_u32|i64_i32)", c.base)
    if not match:
        return None
    signed = match[1][0] == "i"
    letter, dtype = ("i", i64) if signed else ("u", u64)
    first, second = (vector_reader(operand, letter) for operand in c.operands[2:4])
    addend = vector_reader(c.operands[4], "I" if signed else "U")
    register, write = c.operands[0].register, mask_writer(c, c.operands[1])

    def step(state: State) -> None:
        product = first(state).astype(dtype) * second(state).astype(dtype)
        extra = addend(state)
        total = product + extra
        # the carry out of bit 63
        carry_out = (product & extra | (product | extra) & ~total) < 0 if signed else total < product
        write(state, np.broadcast_to(carry_out, state.x.shape))
        state.put_pair(register, np.ascontiguousarray(np.broadcast_to(total, state.x.shape)))

    return step


def _shift(c: Compiling) -> Step | None:
    register = c.operands[0].register if c.operands else 0
    if c.base in ("v_lshlrev_b64", "v_lshrrev_b64", "v_ashrrev_i64"):
        amount = vector_reader(c.operands[1], "u")
        value = vector_reader(c.operands[2], "I" if "ashr" in c.base else "U")
        function = np.left_shift if "lshl" in c.base else np.right_shift

        def shift(state: State) -> None:
            bits = value(state)
            state.put_pair(register, function(bits, (amount(state) & u32(63)).astype(bits.dtype)))

        return shift
    if c.base == "v_lshl_add_u64":
        first, addend = vector_reader(c.operands[1], "U"), vector_reader(c.operands[3], "U")
        amount = vector_reader(c.operands[2], "u")
        return lambda state: state.put_pair(
            register, (first(state) << (amount(state) & u32(7)).astype(u64)) + addend(state)
        )
    if c.base == "v_mov_b64":
        read = vector_reader(c.operands[1], "U")
        return lambda state: state.put_pair(register, read(state))
    if c.base == "v_add_nc_u64":
        left, right = vector_reader(c.operands[1], "U"), vector_reader(c.operands[2], "U")
        return lambda state: state.put_pair(register, left(state) + right(state))
    return None


def _division(c: Compiling) -> Step | None:
    if c.base == "v_div_scale_f32":
        return _scale(c)
    if c.base == "v_div_fmas_f32":
        return _fmas(c)
    return _fixup(c) if c.base == "v_div_fixup_f32" else None


def _exponent(value: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(value).view(u32) >> u32(23) & u32(255)).astype(i32)


def _subnormal(value: np.ndarray) -> np.ndarray:
    return (np.abs(value) < 2.0**-126) & (value != 0)


def _scale(c: Compiling) -> Step:
    """Scale the numerator, the denominator or both by 2**64 or 2**-64 if the quotient could not be computed otherwise.
    The mask marks the lanes in which v_div_fmas must scale the result back.

    The ISA documents cannot be taken literally for denominators whose inverse is subnormal. They test the inverse in
    float64, where it is never subnormal, so no denominator would be scaled. If the quotient is subnormal too, they
    multiply the denominator by 2**64, which makes it infinite. In both cases subnormal quotients would become zero or
    infinity. Here the inverse is tested in float32, and the denominator is divided by 2**64: together with the
    numerator, or alone if the quotient is subnormal too (v_div_fmas then corrects the result). With these rules, the
    compiler's sequence rounds every quotient correctly, and the inverse of a denominator is never flushed by v_rcp
    (test_division.py). Kernels don't use the float64 form.
    """
    value, denominator, numerator = (vector_reader(operand, "f") for operand in c.operands[2:5])
    register, write = c.operands[0].register, mask_writer(c, c.operands[1])

    def step(state: State) -> None:
        s0, s1, s2 = np.broadcast_arrays(value(state), denominator(state), numerator(state))
        quotient, inverse = s2.astype(f64) / s1, 1 / s1.astype(f64)
        up, down = np.ldexp(s0, 64), np.ldexp(s0, -64)
        bits = [np.ascontiguousarray(x).view(u32) for x in (s0, s1, s2)]
        of_denominator, of_numerator = bits[0] == bits[1], bits[0] == bits[2]
        cases = [
            ((s2 == 0) | (s1 == 0), np.full_like(s0, np.nan), False),
            (_exponent(s2) - _exponent(s1) >= 96, np.where(of_denominator, up, s0), True),
            (_subnormal(s1), up, False),
            (_subnormal(inverse) & _subnormal(quotient), np.where(of_denominator, down, s0), True),
            (_subnormal(inverse), down, False),
            (_subnormal(quotient), np.where(of_numerator, up, s0), True),
            (_exponent(s2) <= 23, up, False),
        ]
        conditions = [condition for condition, _, _ in cases]
        result = np.select(conditions, [scaled for _, scaled, _ in cases], s0).astype(f32)
        flags = np.select(conditions, [np.full(s0.shape, flag) for _, _, flag in cases], False)
        write(state, np.broadcast_to(flags, state.x.shape))
        state.put(register, result)

    return step


def _fmas(c: Compiling) -> Step:
    readers = [vector_reader(operand, "f") for operand in c.operands[1:]]
    register, mask = c.operands[0].register, mask_reader(c, Operand("vcc", "s", VCC, 2))

    def step(state: State) -> None:
        a, b, addend = (reader(state) for reader in readers)
        result = floats.fma32(a, b, addend)
        scaled = mask(state)
        if scaled.any():
            factor = np.where(_exponent(addend) > 127, 2.0**64, 2.0**-64)
            exact = (a.astype(f64) * b + addend) * factor
            result = np.where(scaled, exact.astype(f32), result)
        state.put(register, result)

    return step


def _fixup(c: Compiling) -> Step:
    """Handle the special cases of a quotient (NaN, division by zero, infinities); otherwise set its sign.

    The last special case is an overflow. The documents test whether the denominator's exponent is 255, which never
    occurs at this point. Here the quotient is tested instead: without this case, 1e30 / 1e-30 would be NaN, from
    inf - inf in the last step.
    """
    readers = [vector_reader(operand, "f") for operand in c.operands[1:]]
    register = c.operands[0].register

    def step(state: State) -> None:
        quotient, denominator, numerator = np.broadcast_arrays(*(reader(state) for reader in readers))
        sign = np.where(np.signbit(denominator) ^ np.signbit(numerator), f32(-1), f32(1))
        special = [
            np.isnan(numerator),
            np.isnan(denominator),
            (numerator == 0) & (denominator == 0) | np.isinf(numerator) & np.isinf(denominator),
            (denominator == 0) | np.isinf(numerator),
            np.isinf(denominator) | (numerator == 0),
            _exponent(numerator) - _exponent(denominator) < -150,
            ~np.isfinite(quotient),
        ]
        nan, infinite, zero = f32(np.nan), sign * f32(np.inf), sign * f32(0)
        values = [numerator, denominator, nan, infinite, zero, zero, infinite]
        result = np.select(special, values, sign * np.abs(quotient))
        state.put(register, result.astype(f32))

    return step
