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
def _two(first, second, first_mask, second_mask):
    """Load two blocks in fp32."""
    one = tl.load(first, mask=first_mask, other=0.0)
    return one.to(tl.float32), tl.load(second, mask=second_mask, other=0.0).to(tl.float32)


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
    # Whether weights and angles are loaded before the sum of the norm, which needs registers.
    EARLY: tl.constexpr,
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
    angle = tl.where(first, column, partner) if ONCE else column
    if EARLY:
        # as in `rms_norm_kernel`
        angle_cos, angle_sin = _two(cos + angle, sin + angle, is_rotated, is_rotated)
        if weight is not None:
            weight_x, weight_y = _two(weight + column, weight + partner, inside, is_rotated)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        if not EARLY:
            weight_x, weight_y = _two(weight + column, weight + partner, inside, is_rotated)
        x, y = normed(x, scale, weight_x, dtype, ONE_PLUS), normed(y, scale, weight_y, dtype, ONE_PLUS)
    if not EARLY:
        angle_cos, angle_sin = _two(cos + angle, sin + angle, is_rotated, is_rotated)
    angle_sin = tl.where(first, -angle_sin, angle_sin)
    rotated = (x * angle_cos).to(dtype).to(tl.float32) + (y * angle_sin).to(dtype).to(tl.float32)
    if ROTATED < DIM:
        rotated = tl.where(is_rotated, rotated, x)
    return rotated.to(dtype)


# Other kernels call the functions of this module.
BUILDS: tuple[Build, ...] = ()
