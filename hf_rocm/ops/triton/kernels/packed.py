"""A number and its index in one integer, so that one max reduction returns both.

The integers are ordered by number, with NaN as the largest and -0 below 0, and among equal numbers by descending index.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build

# An integer below every packed one.
LEAST = tl.constexpr(-(2**63))


@triton.jit
def pack(values, index, SIZE: tl.constexpr):
    """Pack fp32 numbers and int32 indices below SIZE, which is at most 2³¹."""
    bits = values.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(values == values, ordered, 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (SIZE - 1 - index).to(tl.int64)


@triton.jit
def index_of(packed, SIZE: tl.constexpr):
    return (SIZE - 1 - (packed & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def number_of(packed):
    ordered = (packed >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


# Other kernels call the functions of this module.
BUILDS: tuple[Build, ...] = ()
