"""Round the rows of a tensor to 8 bits, each with its own scale: a program reads a row twice, the second time from a
cache."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import ARCHITECTURES, Build
from hf_rocm.ops.triton.tiles import rounding_tile

_SMALLEST = tl.constexpr(2.0**-126)
# In fp32, the sum of this number and a number up to 2²² is rounded to an integer, with ties to even.
_WHOLE = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def round_rows_kernel(
    x,  # [M, K]
    out,  # [M, K] int8 or fp8
    scale,  # [M] fp32
    k_size,
    # The largest number of the format.
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x += row * k_size
    out += row * k_size
    column = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, k_size, BLOCK):
        values = tl.load(x + start + column, mask=start + column < k_size, other=0.0).to(tl.float32)
        # compared as integers, magnitudes have the same order, and NaN is larger than infinity
        top = tl.maximum(top, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    size = tl.div_rn(tl.max(top, 0).to(tl.float32, bitcast=True), LARGEST)
    # NaN stays NaN.
    size = tl.where(size < _SMALLEST, _SMALLEST, size)
    tl.store(scale + row, size)
    for start in tl.range(0, k_size, BLOCK):
        inside = start + column < k_size
        values = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
        numbers = tl.div_rn(values, tl.zeros_like(values) + size)
        if out.dtype.element_ty == tl.int8:
            numbers = (numbers + _WHOLE) - _WHOLE
        tl.store(out + start + column, numbers.to(out.dtype.element_ty), mask=inside)


def _build(k: int, x: str, out: str, largest: float, *architectures: str) -> Build:
    block, threads = rounding_tile(k)
    return Build(
        round_rows_kernel,
        {"x": f"*{x}", "out": f"*{out}", "scale": "*fp32", "k_size": "i32"},
        {"LARGEST": largest, "BLOCK": block},
        threads=threads,
        divisible=("k_size",),
        architectures=architectures or tuple(ARCHITECTURES),
    )


BUILDS = (
    _build(4096, "bf16", "i8", 127.0),
    _build(256, "fp16", "i8", 127.0),
    _build(4096, "bf16", "fp8e4b8", 240.0, "gfx942"),
    _build(4096, "bf16", "fp8e4nv", 448.0, "gfx950", "gfx1201"),
)
