"""Combine the partial results of decode attention, which is split along the keys."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build
from hf_rocm.ops.triton.kernels.decode import LOG2E
from hf_rocm.ops.triton.tiles import GATHERED_COLUMNS


@triton.jit
def gather_kernel(
    sums,  # [R, splits, D_v] fp32, followed by the largest scores and the sums of exponentials, both [R, splits]
    sinks,  # [H] or None
    output,  # [R, D_v]
    # Row r belongs to head r % H.
    heads,
    splits,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Combine the partial results of one row; a program computes BLOCK_V of its columns."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    place = row * splits + split
    parts = tl.num_programs(0).to(tl.int64) * splits
    peaks = sums + parts * VALUE_DIM
    valid = split < splits
    inside = column < VALUE_DIM
    peak = tl.load(peaks + place, mask=valid, other=-float("inf"))
    total = tl.load(peaks + parts + place, mask=valid, other=0.0)
    address = sums + place[:, None] * VALUE_DIM + column[None, :]
    split_sums = tl.load(address, mask=valid[:, None] & inside[None, :], other=0.0)
    # a split without visible keys has a peak of -inf, and may not have written its sums and total
    used = peak > -float("inf")
    total = tl.where(used, total, 0.0)
    split_sums = tl.where(used[:, None], split_sums, 0.0)
    highest = tl.max(peak, 0)
    if sinks is not None:
        sink = tl.load(sinks + row % heads).to(tl.float32) * LOG2E
        highest = tl.maximum(highest, sink)
    level = tl.where(highest == -float("inf"), 0.0, highest)
    weight = tl.exp2(peak - level)
    whole = tl.sum(weight * total, 0)
    if sinks is not None:
        whole += tl.exp2(sink - level)
    result = tl.sum(split_sums * weight[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(output + row * VALUE_DIM + column, result.to(output.dtype.element_ty), mask=inside)


def _build(value_dim: int, splits: int, dtype: str = "bf16") -> Build:
    return Build(
        gather_kernel,
        {"sums": "*fp32", "sinks": f"*{dtype}", "output": f"*{dtype}", "heads": "i32", "splits": "i32"},
        {"VALUE_DIM": value_dim, "BLOCK": splits, "BLOCK_V": GATHERED_COLUMNS},
        num_warps=1,
    )


BUILDS = (_build(128, 64), _build(256, 128, "fp16"))
