"""RMSNorm of rows, with or without the residual sum before it; every value is read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build


@triton.jit
def rms_norm_kernel(
    x,
    residual,  # None: no sum
    weight,
    out,
    total,
    rows,
    outer_stride,
    inner,  # row r is at (r // inner) · outer_stride + (r % inner) · inner_stride
    inner_stride,
    eps,
    DIM: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    there = (row < rows) & (column < DIM)
    values = tl.load(x + row // inner * outer_stride + row % inner * inner_stride + column, mask=there, other=0.0)
    place = row * DIM + column
    if residual is not None:
        values = (values.to(tl.float32) + tl.load(residual + place, mask=there, other=0.0).to(tl.float32)).to(
            values.dtype
        )
        tl.store(total + place, values, mask=there)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)[:, None]
    factor = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)
    if ONE_PLUS:
        normed = wide * scale * (1.0 + factor)
    else:
        # transformers rounds here, and again after the weight
        normed = (wide * scale).to(values.dtype).to(tl.float32) * factor
    tl.store(out + place, normed.to(values.dtype), mask=there)


def _build(dim: int, rows: int, threads: int, *, add: bool, one_plus: bool = False, dtype: str = "bf16") -> Build:
    pointers = {name: f"*{dtype}" for name in ("x", "weight", "out", *(("residual", "total") if add else ()))}
    absent = {} if add else {"residual": None, "total": None}
    block = triton.next_power_of_2(dim)
    return Build(
        rms_norm_kernel,
        {**pointers, "rows": "i32", "outer_stride": "i32", "inner": "i32", "inner_stride": "i32", "eps": "fp32"},
        {**absent, "DIM": dim, "ONE_PLUS": one_plus, "ROWS": rows, "BLOCK": block},
        threads=threads,
        divisible=("outer_stride", "inner_stride"),
    )


BUILDS = (
    _build(4096, 1, 256, add=False),
    _build(4096, 1, 512, add=True),
    _build(8192, 1, 512, add=True, dtype="fp16"),
    _build(3584, 1, 256, add=True, one_plus=True),
    _build(128, 16, 256, add=False),
)
