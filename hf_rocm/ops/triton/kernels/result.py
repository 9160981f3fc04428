"""Device functions that finish a program's block of a GEMM: scale, bias, gate, residual sum and store."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build


@triton.jit
def write_result(
    sums,  # [M, N] in fp32
    # The sums of the second half of W if there is a gate.
    ups,
    scale,
    bias,
    residual,  # or None
    out,
    m,
    n,
    m_size,
    n_size,
    ACTIVATION: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Store a program's block of the result; if PARTS is more than 1, store its sums for `sum_parts`."""
    if PARTS > 1:
        out += tl.program_id(2).to(tl.int64) * m_size * n_size
        store(sums, None, out, m, n, m_size, n_size)
    else:
        product = finished(sums, scale, bias, n, n_size, out.dtype.element_ty)
        if ACTIVATION is not None:
            up = finished(ups, scale, bias, n + n_size, 2 * n_size, out.dtype.element_ty)
            product = gate(product, up, ACTIVATION)
        store(product, residual, out, m, n, m_size, n_size)


@triton.jit
def finished(product, scale, bias, n, n_size, dtype: tl.constexpr):
    """The sums of a GEMM [M, N] with its scale and bias, rounded as a separate linear layer would round them."""
    if scale is not None:
        product *= tl.load(scale + n, mask=n < n_size, other=0.0)[None, :]
    if bias is not None:
        product += tl.load(bias + n, mask=n < n_size, other=0.0)[None, :].to(tl.float32)
    return product.to(dtype)


@triton.jit
def gate(first, up, ACTIVATION: tl.constexpr):
    """act(first) · up, rounded where the separate layers round."""
    value = first.to(tl.float32)
    if ACTIVATION == "silu":
        value = value / (1.0 + tl.exp(-value))
    elif ACTIVATION == "gelu":
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    else:
        # 0.5 · (1 + tanh(z)) is the logistic function of 2z
        tl.static_assert(ACTIVATION == "gelu_tanh")
        value = value / (1.0 + tl.exp(-1.5957691216057308 * (value + 0.044715 * value * value * value)))
    return (value.to(first.dtype).to(tl.float32) * up.to(tl.float32)).to(first.dtype)


@triton.jit
def store(product, residual, out, m, n, m_size, n_size):
    """Add the residual and store a program's block.

    Kernels that loaded the residual before their sums were slower on an H200.
    """
    at = m[:, None].to(tl.int64) * n_size + n[None, :]
    real = (m < m_size)[:, None] & (n < n_size)[None, :]
    if residual is not None:
        addend = tl.load(residual + at, mask=real, other=0.0).to(tl.float32)
        product = (product.to(tl.float32) + addend).to(product.dtype)
    tl.store(out + at, product, mask=real)


# Other kernels call the functions of this module.
BUILDS: tuple[Build, ...] = ()
