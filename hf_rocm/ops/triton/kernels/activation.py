"""Activations, alone or as the gate of a gated MLP: every value is read once."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """Round a value as the unfused layers do between two operations."""
    return value.to(DTYPE).to(tl.float32)


@triton.jit
def _clamped_swiglu(gate, up, limit, alpha, DTYPE: tl.constexpr):
    """See `hf_rocm.ops.act_and_mul`; comparisons propagate NaN."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    sigmoid = rounded(1.0 / (1.0 + tl.exp(-rounded(gate * alpha, DTYPE))), DTYPE)
    return rounded(up + 1.0, DTYPE) * rounded(gate * sigmoid, DTYPE)


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "quick_gelu":
        return gate / (1.0 + tl.exp(-1.702 * gate))
    else:
        # 0.5 · (1 + tanh(z)) is the logistic function of 2z
        tl.static_assert(ACTIVATION == "gelu_tanh" or ACTIVATION == "gelu_new")
        return gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))


@triton.jit
def gated(gate, up, limit, alpha, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """act(gate) · up for values in fp32, rounded to DTYPE where the unfused layers round."""
    if ACTIVATION == "clamped_swiglu":
        result = _clamped_swiglu(gate, up, limit, alpha, DTYPE)
    else:
        result = rounded(_activated(gate, ACTIVATION), DTYPE) * up
    return result.to(DTYPE)


@triton.jit
def act_and_mul_kernel(
    x,
    out,
    row_stride,
    limit,
    alpha,
    DIM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = out.dtype.element_ty
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if INTERLEAVED:
        both = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
        pairs = tl.load(x + row * row_stride + both, mask=both < 2 * DIM, other=0.0)
        gate, up = tl.split(tl.reshape(pairs, (BLOCK, 2)))
    else:
        gate = tl.load(x + row * row_stride + column, mask=column < DIM, other=0.0)
        up = tl.load(x + row * row_stride + DIM + column, mask=column < DIM, other=0.0)
    result = gated(gate.to(tl.float32), up.to(tl.float32), limit, alpha, ACTIVATION, dtype)
    tl.store(out + row * DIM + column, result, mask=column < DIM)


@triton.jit
def act_kernel(x, out, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + place, mask=place < size, other=0.0).to(tl.float32)
    tl.store(out + place, _activated(values, ACTIVATION).to(out.dtype.element_ty), mask=place < size)


def _build(dim: int, activation: str, *, interleaved: bool = False, dtype: str = "bf16") -> Build:
    return Build(
        act_and_mul_kernel,
        {"x": f"*{dtype}", "out": f"*{dtype}", "row_stride": "i32", "limit": "fp32", "alpha": "fp32"},
        {"DIM": dim, "ACTIVATION": activation, "INTERLEAVED": interleaved, "BLOCK": 1024},
        threads=128,
        divisible=("row_stride",),
    )


def _act_build(activation: str, dtype: str = "bf16") -> Build:
    return Build(
        act_kernel,
        {"x": f"*{dtype}", "out": f"*{dtype}", "size": "i32"},
        {"ACTIVATION": activation, "BLOCK": 1024},
        threads=128,
        divisible=("size",),
    )


BUILDS = (
    _build(14336, "silu"),
    _build(12288, "silu", dtype="fp16"),
    _build(4304, "gelu"),
    _build(14336, "gelu_tanh"),
    _build(2880, "clamped_swiglu", interleaved=True),
    _act_build("quick_gelu"),
    _act_build("gelu_new", "fp16"),
)
