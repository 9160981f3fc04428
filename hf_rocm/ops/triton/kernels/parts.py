"""GEMMs with the precision of fp32, computed by matrix instructions for bf16.

An fp32 number is the sum of three bf16 numbers, and an fp16 number the sum of two. So a matrix is a tuple of bf16
parts. All architectures in `ARCHITECTURES` have matrix instructions for bf16; RDNA has none for fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build


@triton.jit
def inverted(below, row, LEVELS: tl.constexpr):
    """(I + below)⁻¹ for a strictly lower triangular matrix of 2 ** LEVELS rows, by blocks of doubling size.

    [[L, 0], [M, N]]⁻¹ = [[L⁻¹, 0], [-N⁻¹ · M · L⁻¹, N⁻¹]]
    """
    index = row[:, None]
    pair = (index % 2 == 1) & (row[None, :] == index - 1)
    inverse = tl.where(index == row[None, :], 1.0, 0.0) - tl.where(pair, below, 0.0)
    for level in range(1, LEVELS):
        block = index >> level
        pair = (block % 2 == 1) & ((row[None, :] >> level) == block - 1)
        parts = split(inverse, 3)
        inverse -= times(parts, split(times(split(tl.where(pair, below, 0.0), 3), parts, 3), 3), 3)
    return inverse


@triton.jit
def times(a, b, PARTS: tl.constexpr):
    """Multiply two matrices, which are sums of bf16 matrices of decreasing magnitude, in fp32 precision.

    Products of parts i and j with i + j > 2 are left out: they are below the last bit of fp32. PARTS: the number of
    parts of `a`. Without it, Triton would compile (1 part, 3 parts) and (2 parts, 2 parts) into one function: the names
    of compiled functions contain the types of all parts, but not which argument a part belongs to.
    """
    total = tl.dot(a[0], b[0])
    if PARTS + len(b) > 2:
        rest = tl.zeros_like(total)
        for i in tl.static_range(PARTS):
            for j in tl.static_range(len(b)):
                if i + j == 1 or i + j == 2:
                    rest = tl.dot(a[i], b[j], rest)
        total += rest
    return total


@triton.jit
def split(x, PARTS: tl.constexpr):
    """Split fp32 numbers into this many bf16 numbers: 3 for any fp32 number, 2 if it is an fp16 number, 1 if bf16."""
    parts = ()
    for _ in tl.static_range(PARTS):
        # the first 16 bits, which are x rounded toward zero; the difference is exact
        part = (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        x -= part.to(tl.float32)
        parts += (part,)  # type: ignore[assignment]
    return parts


@triton.jit
def load_parts(pointer, plane, offsets, mask, PARTS: tl.constexpr):
    """Load the parts of a matrix, `plane` numbers apart."""
    parts = ()
    for _ in tl.static_range(PARTS):
        parts += (tl.load(pointer + offsets, mask=mask, other=None if mask is None else 0.0),)  # type: ignore[assignment]
        pointer += plane
    return parts


@triton.jit
def store_parts(pointer, plane, offsets, mask, x, PARTS: tl.constexpr):
    """Store the parts of an fp32 matrix, `plane` numbers apart."""
    parts = split(x, PARTS)
    for part in tl.static_range(PARTS):
        tl.store(pointer + offsets, parts[part], mask=mask)
        pointer += plane


@triton.jit
def total_of(parts):
    """The fp32 matrix with these parts."""
    total = parts[0].to(tl.float32)
    for part in tl.static_range(1, len(parts)):
        total += parts[part].to(tl.float32)
    return total


@triton.jit
def transposed(parts):
    """The parts of the transposed matrix."""
    result = ()
    for part in tl.static_range(len(parts)):
        result += (tl.trans(parts[part]),)  # type: ignore[assignment]
    return result


# Other kernels call the functions of this module.
BUILDS: tuple[Build, ...] = ()
