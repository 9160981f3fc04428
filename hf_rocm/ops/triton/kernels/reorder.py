"""Reorder the columns of x, for a weight whose columns are stored in another order."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build


@triton.jit
def reorder_kernel(
    x,  # [M, K]
    order,  # [K], the column of x for every column of out
    out,  # [M, K]
    k_size,
    BLOCK: tl.constexpr,
):
    """Copy BLOCK columns of one row."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < k_size
    row = tl.program_id(0).to(tl.int64) * k_size
    source = tl.load(order + column, mask=inside, other=0)
    tl.store(out + row + column, tl.load(x + row + source, mask=inside), mask=inside)


BUILDS = tuple(
    Build(
        reorder_kernel,
        {"x": "*bf16", "order": "*i32", "out": "*bf16", "k_size": "i32"},
        {"BLOCK": block},
        threads=threads,
        divisible=("k_size",),
    )
    for block, threads in ((512, 128), (2048, 256))
)
