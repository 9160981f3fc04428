"""Floating-point arithmetic with the hardware's rounding: fused multiply-add, conversions, floats of 4 to 8 bits."""

from __future__ import annotations

from functools import cache

import numpy as np

f32, f64, u32, u64 = np.float32, np.float64, np.uint32, np.uint64

_TAIL32 = u64((1 << 29) - 1)
_HALF32 = u64(1 << 28)


def round_to_odd(total: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Combine a float64 sum and its rounding error into a float64 whose last bit marks it as inexact.

    Rounding the result to a narrower type is the same as rounding the exact sum (Boldo and Melquiond, 2008).
    """
    total, error = np.broadcast_arrays(total, error)
    bits = np.ascontiguousarray(total).view(np.int64).copy()
    inexact = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    outward = (error > 0) == (total > 0)
    bits[inexact & outward] += 1
    bits[inexact & ~outward] -= 1
    return bits.view(f64)


def _sum_error(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """The rounding error of a + b (Knuth's TwoSum)."""
    virtual = total - a
    return (a - (total - virtual)) + (b - virtual)


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a × b + c of float32 with a single rounding. The product is exact in float64; the sum may not be."""
    product = np.multiply(a, b, dtype=f64)
    total = product + c
    bits = np.ascontiguousarray(total).view(u64)
    if ((bits & _TAIL32) == _HALF32).any():
        total = round_to_odd(total, _sum_error(product, np.asarray(c, f64), total))
    return total.astype(f32)


def fma16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a × b + c of float16 (or float32, for v_fma_mix) with a single rounding to float16."""
    product = np.multiply(a, b, dtype=f64)
    total = product + c
    return round_to_odd(total, _sum_error(product, np.asarray(c, f64), total)).astype(np.float16)


def to_bf16(value: np.ndarray) -> np.ndarray:
    """Round float32 to bf16, ties to even. Returns uint32 with the bits in the low half. NaN becomes a quiet NaN."""
    bits = np.ascontiguousarray(value).view(u32)
    rounded = (bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16)
    return np.where(np.isnan(value), (bits >> u32(16)) | u32(0x40), rounded)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """Convert bf16, in the low 16 bits of uint32, to float32."""
    return (bits << u32(16)).view(f32)


def to_integer(value: np.ndarray, low: int, high: int) -> np.ndarray:
    """Truncate to an integer and clamp to [low, high]. NaN becomes 0."""
    whole = np.trunc(np.nan_to_num(np.asarray(value, f64), nan=0.0, posinf=float(high), neginf=float(low)))
    return np.clip(whole, low, high).astype(np.int64)


def flush32(value: np.ndarray) -> np.ndarray:
    """Flush subnormal float32 numbers to zero of the same sign."""
    bits = np.ascontiguousarray(value).view(u32)
    return np.where(bits & u32(0x7F800000) == 0, bits & u32(0x80000000), bits).view(f32)


class Small:
    """A floating-point format of at most 8 bits: its table of values, and rounding to it.

    exponent, mantissa: number of bits. bias: exponent bias. special: "ieee" (infinities and NaNs as in IEEE 754), "fn"
    (no infinity; all ones is NaN), "fnuz" (no negative zero, no infinity; 0x80 is NaN) or "none" (every code is a
    number).
    """

    def __init__(self, exponent: int, mantissa: int, bias: int, special: str) -> None:
        self.mantissa, self.bias, self.special = mantissa, bias, special
        self.bits = 1 + exponent + mantissa
        self.values = self._table(exponent)
        finite = self.values[np.isfinite(self.values)]
        self.largest = float(finite.max())

    def _table(self, exponent: int) -> np.ndarray:
        codes = np.arange(1 << self.bits)
        field = codes >> self.mantissa & (1 << exponent) - 1
        fraction = codes & (1 << self.mantissa) - 1
        scale = 1 << self.mantissa
        normal = (1 + fraction / scale) * np.exp2(field - float(self.bias))
        values = np.where(field == 0, fraction / scale * 2.0 ** (1 - self.bias), normal)
        top = field == (1 << exponent) - 1
        if self.special == "ieee":
            values = np.where(top, np.where(fraction == 0, np.inf, np.nan), values)
        if self.special == "fn":
            values = np.where(top & (fraction == scale - 1), np.nan, values)
        negative = codes >> (self.bits - 1) == 1
        values = np.where(negative, -values, values)
        if self.special == "fnuz":
            values[1 << (self.bits - 1)] = np.nan
        return values.astype(f32)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Convert codes to float32."""
        return self.values[codes]

    def encode(self, value: np.ndarray, *, clamp: bool = False) -> np.ndarray:
        """Round float32 to nearest, ties to even. Returns uint32 codes. A number beyond the largest one becomes the
        largest one if `clamp` is set or the format has neither infinity nor NaN. Otherwise it becomes infinity, or NaN
        if the format has no infinity."""
        exact = np.asarray(value, f64)
        magnitude = np.abs(exact)
        # the spacing of representable numbers around the value
        _, power = np.frexp(np.where(np.isfinite(magnitude), magnitude, 0.0))
        power = np.maximum(power - 1, 1 - self.bias)
        step = np.exp2((power - self.mantissa).astype(f64))
        steps = np.rint(np.where(np.isfinite(magnitude), magnitude, 0.0) / step)
        rounded = steps * step
        over = (rounded > self.largest) | np.isinf(magnitude)
        _, power = np.frexp(rounded)
        field = np.where(rounded < 2.0 ** (1 - self.bias), 0, power - 1 + self.bias)
        base = np.exp2(np.where(field == 0, 1 - self.bias, power - 1).astype(f64))
        fraction = rounded / base * (1 << self.mantissa) - np.where(field == 0, 0, 1 << self.mantissa)
        codes = (field.astype(np.int64) << self.mantissa) + fraction.astype(np.int64)
        sign = 1 << (self.bits - 1)
        codes = np.where(over, self._over(clamp), codes)
        codes = np.where(np.isnan(exact), self._nan(), codes)
        negative = np.signbit(exact) & ~((self.special == "fnuz") & ((codes == 0) | (codes == sign)))
        return np.where(negative, codes | sign, codes).astype(u32)

    def _code(self, value: float) -> int:
        return int(np.flatnonzero(self.values == value)[0])

    def _over(self, clamp: bool) -> int:
        if clamp or self.special == "none":
            return self._code(self.largest)
        return self._code(np.inf) if self.special == "ieee" else self._nan()

    def _nan(self) -> int:
        if self.special == "fnuz":
            return 1 << (self.bits - 1)
        return (1 << (self.bits - 1)) - 1


@cache
def small(name: str) -> Small:
    """A format by name: OCP's fp8 and bf8, their fnuz variants, fp6, bf6 and fp4."""
    return {
        "fp8": lambda: Small(4, 3, 7, "fn"),
        "bf8": lambda: Small(5, 2, 15, "ieee"),
        "fp8_fnuz": lambda: Small(4, 3, 8, "fnuz"),
        "bf8_fnuz": lambda: Small(5, 2, 16, "fnuz"),
        "fp6": lambda: Small(2, 3, 1, "none"),
        "bf6": lambda: Small(3, 2, 3, "none"),
        "fp4": lambda: Small(2, 1, 1, "none"),
    }[name]()
