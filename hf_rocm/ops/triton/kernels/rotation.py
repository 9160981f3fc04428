"""Device functions of the kernels that normalise and rotate heads."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build


@triton.jit
def normed(values, scale, weight, dtype: tl.constexpr, ONE_PLUS: tl.constexpr):
    """Apply a norm, rounded as in `rms_norm_kernel`: before and after the weight, or once with (1 + w)."""
    if ONE_PLUS:
        values = values * scale * (1.0 + weight)
    else:
        values = (values * scale).to(dtype).to(tl.float32) * weight
    return values.to(dtype).to(tl.float32)


@triton.jit
def rotated_rows(
    at,  # [N, 1], the first element of every head
    valid,  # [N, 1]
    cos,
    sin,
    weight,  # [D], the weight of the norm; None: no norm
    eps,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    ONCE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load heads [N, BLOCK_D], normalise them, and rotate halves with the rounding of `rope_kernel`.

    The partner of each element is loaded separately. The products are rounded to the dtype before they are added.
    Kernels that call this function must be compiled without contraction: LLVM multiplies in the dtype itself where that
    gives the same number, and would then contract product and sum.
    """
    dtype: tl.constexpr = at.dtype.element_ty
    half: tl.constexpr = ROTATED // 2
    column = tl.arange(0, BLOCK_D)[None, :]
    first = column < half
    is_rotated = column < ROTATED
    inside = column < DIM
    partner = tl.where(first, column + half, column - half)
    x = tl.load(at + column, mask=valid & inside, other=0.0).to(tl.float32)
    y = tl.load(at + partner, mask=valid & is_rotated, other=0.0).to(tl.float32)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        x = normed(x, scale, tl.load(weight + column, mask=inside, other=0.0).to(tl.float32), dtype, ONE_PLUS)
        y = normed(y, scale, tl.load(weight + partner, mask=is_rotated, other=0.0).to(tl.float32), dtype, ONE_PLUS)
    angle = tl.where(first, column, partner) if ONCE else column
    angle_cos = tl.load(cos + angle, mask=is_rotated, other=0.0).to(tl.float32)
    angle_sin = tl.load(sin + angle, mask=is_rotated, other=0.0).to(tl.float32)
    angle_sin = tl.where(first, -angle_sin, angle_sin)
    rotated = (x * angle_cos).to(dtype).to(tl.float32) + (y * angle_sin).to(dtype).to(tl.float32)
    if ROTATED < DIM:
        rotated = tl.where(is_rotated, rotated, x)
    return rotated.to(dtype)


# Other kernels call the functions of this module.
BUILDS: tuple[Build, ...] = ()
