"""RMSNorm of rows, with or without a residual sum or in another order of columns, and LayerNorm of a residual sum.

A kernel reads its input once; for another order of columns, it reads it again in that order. All loads come before the
first sum, because compilers move no load ahead of the barrier of a sum over warps, and few programs hide its latency.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build


@triton.jit
def rms_norm_kernel(
    x,
    residual,  # None: no sum
    # None: no norm of the sum.
    weight,
    out,
    total,
    rows,
    outer_stride,
    # Offset of row r: (r // inner) · outer_stride + (r % inner) · inner_stride.
    inner,
    inner_stride,
    eps,
    # The weight of a norm of x before the sum, or None.
    before,
    before_eps,
    # [DIM], the column of x for every column of out; None: the same columns. Only without a sum.
    order,
    DIM: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # int32 for fewer than 2³¹ rows: a division of 64-bit integers is a long sequence of instructions
    row = tl.program_id(0).to((tl.program_id(0) + rows).dtype) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    valid = (row < rows) & (column < DIM)
    start = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    values = tl.load(x + start + column, mask=valid, other=0.0)
    place = row.to(tl.int64) * DIM + column
    if before is not None:
        first_weights = tl.load(before + column, mask=column < DIM, other=0.0)
    if residual is not None:
        addend = tl.load(residual + place, mask=valid, other=0.0)
    if order is not None:
        tl.static_assert(residual is None)
        source = tl.load(order + column, mask=column < DIM, other=0)
        ordered = tl.load(x + start + source, mask=valid, other=0.0)
        weights = tl.load(weight + source, mask=column < DIM, other=0.0)
    elif weight is not None:
        weights = tl.load(weight + column, mask=column < DIM, other=0.0)
    if before is not None:
        values = _weighted(values, _factor(values, before_eps, DIM), first_weights, ONE_PLUS)
    if residual is not None:
        values = (values.to(tl.float32) + addend.to(tl.float32)).to(values.dtype)
        tl.store(total + place, values, mask=valid)
    if weight is not None:
        factor = _factor(values, eps, DIM)
        if order is not None:
            # The sum of squares is that of the original order, bit for bit.
            values = ordered
        tl.store(out + place, _weighted(values, factor, weights, ONE_PLUS), mask=valid)


@triton.jit
def _factor(values, eps, DIM: tl.constexpr):
    """The factor by which the norm multiplies a row."""
    wide = values.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)[:, None]


@triton.jit
def _weighted(values, factor, weights, ONE_PLUS: tl.constexpr):
    """Multiply values by the factor of their row and by the weights of their columns."""
    wide = values.to(tl.float32)
    if ONE_PLUS:
        normed = wide * factor * (1.0 + weights.to(tl.float32))
    else:
        # transformers rounds here, and again after the weight
        normed = (wide * factor).to(values.dtype).to(tl.float32) * weights.to(tl.float32)
    return normed.to(values.dtype)


@triton.jit
def layer_norm_kernel(
    x,
    residual,
    weight,
    bias,  # or None
    out,
    # None: no output of the sum.
    total,
    rows,
    eps,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to((tl.program_id(0) + rows).dtype) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    valid = (row < rows) & (column < DIM)
    place = row.to(tl.int64) * DIM + column
    values = tl.load(x + place, mask=valid, other=0.0).to(tl.float32)
    values += tl.load(residual + place, mask=valid, other=0.0).to(tl.float32)
    weights = tl.load(weight + column, mask=column < DIM, other=0.0)
    if bias is not None:
        addend = tl.load(bias + column, mask=column < DIM, other=0.0)
    values = values.to(out.dtype.element_ty)
    if total is not None:
        tl.store(total + place, values, mask=valid)
    wide = values.to(tl.float32)
    centred = tl.where(column < DIM, wide - (tl.sum(wide, axis=1) / DIM)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=1) / DIM + eps)[:, None]
    normed = centred * scale * weights.to(tl.float32)
    if bias is not None:
        normed += addend.to(tl.float32)
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=valid)


def _build(
    dim: int,
    rows: int,
    threads: int,
    *,
    add: bool,
    before: bool = False,
    then: bool = True,
    one_plus: bool = False,
    dtype: str = "bf16",
    order: bool = False,
) -> Build:
    tensors = {"x": True, "weight": then, "out": then, "residual": add, "total": add, "before": before, "order": order}
    pointers = {name: "*i32" if name == "order" else f"*{dtype}" for name, present in tensors.items() if present}
    absent = {name: None for name, present in tensors.items() if not present}
    block = triton.next_power_of_2(dim)
    return Build(
        rms_norm_kernel,
        {
            **pointers,
            "rows": "i32",
            "outer_stride": "i32",
            "inner": "i32",
            "inner_stride": "i32",
            "eps": "fp32",
            "before_eps": "fp32",
        },
        {**absent, "DIM": dim, "ONE_PLUS": one_plus, "ROWS": rows, "BLOCK": block},
        threads=threads,
        divisible=("outer_stride", "inner_stride"),
    )


def _layer_build(
    dim: int, rows: int, threads: int, *, bias: bool = True, total: bool = False, dtype: str = "bf16"
) -> Build:
    tensors = {"x": True, "residual": True, "weight": True, "bias": bias, "out": True, "total": total}
    return Build(
        layer_norm_kernel,
        {**{name: f"*{dtype}" for name, present in tensors.items() if present}, "rows": "i32", "eps": "fp32"},
        {
            **{name: None for name, present in tensors.items() if not present},
            "DIM": dim,
            "ROWS": rows,
            "BLOCK": triton.next_power_of_2(dim),
        },
        threads=threads,
    )


BUILDS = (
    _build(4096, 1, 256, add=False),
    _build(4096, 1, 256, add=False, order=True),
    _build(4096, 1, 512, add=True),
    _build(8192, 1, 512, add=True, dtype="fp16"),
    _build(3584, 1, 256, add=True, one_plus=True),
    _build(128, 16, 256, add=False),
    _build(2560, 1, 256, add=True, before=True, one_plus=True),  # Gemma 3
    _build(2560, 1, 256, add=True, before=True, then=False, one_plus=True),
    _build(4096, 1, 256, add=True, before=True),  # GLM-4
    _layer_build(768, 1, 64),  # BERT-base
    _layer_build(1024, 2, 128, dtype="fp16"),
    _layer_build(384, 4, 128),  # MiniLM
    _layer_build(1152, 1, 128, total=True),  # SigLIP
    _layer_build(768, 2, 128, bias=False, total=True),  # ModernBERT
)
