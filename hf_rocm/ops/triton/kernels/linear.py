"""Products of few rows, x Wᵀ, with what stands before and after them in a decoder layer.

Such a product reads all of W and computes next to nothing, so memory is what it waits for: a program reads few rows of
W in long pieces, and the gate of an MLP and the residual sum ride along. Everything is added up in fp32 and rounded
where the separate layers round.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build
from hf_rocm.ops.triton.linear import tile


@triton.jit
def matrix_vector(
    x,  # [1, K]
    weight,  # [N, K], with a gate [2N, K]
    bias,  # one for each row of weight, or None
    residual,  # [1, N] or None
    out,  # [1, N]
    m_size,
    n_size,
    k_size,
    ACTIVATION: tl.constexpr,  # of the gate, or None
    EVEN: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N columns of the result for one row, by multiplying and adding up."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)[None, :]
    x += columns
    weight += tl.minimum(n, n_size - 1)[:, None].to(tl.int64) * k_size + columns
    gap = n_size.to(tl.int64) * k_size
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if ACTIVATION is not None:
        ups = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k in tl.range(0, k_size, BLOCK_K):
        inside = columns < k_size - k
        first = piece(weight + k, inside, EVEN)
        if ACTIVATION is not None:
            second = piece(weight + gap + k, inside, EVEN)
        values = piece(x + k, inside, EVEN).to(tl.float32)
        sums += first.to(tl.float32) * values
        if ACTIVATION is not None:
            ups += second.to(tl.float32) * values
    product = _rounded(tl.sum(sums, 1)[None, :], bias, n, n_size, out.dtype.element_ty)
    if ACTIVATION is not None:
        up = _rounded(tl.sum(ups, 1)[None, :], bias, n + n_size, 2 * n_size, out.dtype.element_ty)
        product = _gated(product, up, ACTIVATION)
    _store(product, residual, out, tl.arange(0, 1), n, m_size, n_size)


@triton.jit
def few_rows(
    x,  # [M, K]
    weight,  # the rest as above
    bias,
    residual,
    out,
    m_size,
    n_size,
    k_size,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,  # K is a multiple of SPLITS · BLOCK_K
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The same with matrix instructions: BLOCK_N rows of W times BLOCK_M rows of x, transposed.

    Warps that have no columns of their own to compute deal K out among themselves, in SPLITS parts.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.minimum(n, n_size - 1)[:, None].to(tl.int64) * k_size
    across = tl.arange(0, BLOCK_K)[None, :]
    down = tl.arange(0, BLOCK_K)[:, None]
    x += m[None, :].to(tl.int64) * k_size
    there = (m < m_size)[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if SPLITS > 1:
        part = tl.arange(0, SPLITS)[:, None, None] * BLOCK_K
        rows, across, down, there = rows[None], part + across[None], part + down[None], there[None]
        sums = tl.zeros([SPLITS, BLOCK_N, BLOCK_M], tl.float32)
    x += down
    weight += rows + across
    gap = n_size.to(tl.int64) * k_size
    ups = sums
    for k in tl.range(0, k_size, SPLITS * BLOCK_K):
        first = piece(weight + k, across < k_size - k, EVEN)
        values = tl.load(x + k, mask=there if EVEN else there & (down < k_size - k), other=0.0)
        sums = tl.dot(first, values, sums)
        if ACTIVATION is not None:
            ups = tl.dot(piece(weight + gap + k, across < k_size - k, EVEN), values, ups)
    if SPLITS > 1:
        sums, ups = tl.sum(sums, 0), tl.sum(ups, 0)
    product = _rounded(tl.trans(sums), bias, n, n_size, out.dtype.element_ty)
    if ACTIVATION is not None:
        up = _rounded(tl.trans(ups), bias, n + n_size, 2 * n_size, out.dtype.element_ty)
        product = _gated(product, up, ACTIVATION)
    _store(product, residual, out, m, n, m_size, n_size)


@triton.jit
def piece(at, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _rounded(product, bias, n, n_size, dtype: tl.constexpr):
    """A product [M, N] with its bias, as the linear layer alone would leave it."""
    if bias is not None:
        product += tl.load(bias + n, mask=n < n_size, other=0.0)[None, :].to(tl.float32)
    return product.to(dtype)


@triton.jit
def _gated(gate, up, ACTIVATION: tl.constexpr):
    value = gate.to(tl.float32)
    if ACTIVATION == "silu":
        value = value / (1.0 + tl.exp(-value))
    elif ACTIVATION == "gelu":
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    else:
        # 0.5 · (1 + tanh(z)) is the logistic function of 2z
        tl.static_assert(ACTIVATION == "gelu_tanh")
        value = value / (1.0 + tl.exp(-1.5957691216057308 * (value + 0.044715 * value * value * value)))
    return (value.to(gate.dtype).to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _store(product, residual, out, m, n, m_size, n_size):
    at = m[:, None].to(tl.int64) * n_size + n[None, :]
    real = (m < m_size)[:, None] & (n < n_size)[None, :]
    if residual is not None:
        beside = tl.load(residual + at, mask=real, other=0.0).to(tl.float32)
        product = (product.to(tl.float32) + beside).to(product.dtype)
    tl.store(out + at, product, mask=real)


def _build(rows: int, n: int, *, activation: str | None = None, residual: bool = False) -> Build:
    """In bf16, as AMD GPUs are given them."""
    tensors = {"x": True, "weight": True, "bias": False, "residual": residual, "out": True}
    cut = tile(rows, n, activation is not None, rocm=True)
    return Build(
        few_rows if cut.matrix else matrix_vector,
        {
            **{name: "*bf16" for name, there in tensors.items() if there},
            **dict.fromkeys(("m_size", "n_size", "k_size"), "i32"),
        },
        {
            **{name: None for name, there in tensors.items() if not there},
            "ACTIVATION": activation,
            "EVEN": True,
            **cut.constants(),
        },
        threads=cut.threads,
        num_stages=cut.stages,
        divisible=("n_size", "k_size"),
        matrix=cut.matrix,
    )


BUILDS = (
    _build(1, 6144),
    _build(1, 4096, residual=True),
    _build(1, 14336, activation="silu"),
    _build(8, 6144),
    _build(8, 4096, residual=True),
    _build(8, 14336, activation="silu"),
)
