"""GEMMs with few rows, x Wᵀ, fused with the operations around them in a decoder layer.

A GEMM with few rows is memory-bound: most of its time is spent reading W. A program reads some rows of W in long
pieces, and computes the gate of an MLP, the residual sum and, for one row of x, the norm. Sums are in fp32 and, except
after the norm, rounded where the separate layers round. W has the dtype of x, or 8 bits (converted in registers) with a
scale for each row or block. A row's scale multiplies the result; a block's multiplies x or a partial sum.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import ARCHITECTURES, GFX11, Build
from hf_rocm.ops.triton.kernels.codes import AMD
from hf_rocm.ops.triton.kernels.eight_bit import to_dtype_of, to_fp32
from hf_rocm.ops.triton.kernels.pairs import multiply_pairs
from hf_rocm.ops.triton.kernels.pieces import piece, read_once
from hf_rocm.ops.triton.kernels.result import finished, store, write_result
from hf_rocm.ops.triton.tiles import eight_bit_tile, linear_tile


@triton.jit
def matrix_vector(
    x,  # [1, K]
    weight,  # [N, K], with a gate [2N, K]
    # fp32, one for each row of weight, or for each block of GROUP × GROUP; or None.
    scale,
    # One for each row of weight, or None.
    bias,
    residual,  # [1, N] or None
    out,  # [1, N]
    m_size,
    n_size,
    # K; with PAIRS, K / 2.
    k_size,
    norm_weight,  # [K], the weight of the RMS norm of x, or None
    eps,
    # The activation of the gate, or None.
    ACTIVATION: tl.constexpr,
    # K is a multiple of BLOCK_K.
    EVEN: tl.constexpr,
    # Rows and columns of weight that share a scale, a multiple of BLOCK_N; 0: one per row or none.
    GROUP: tl.constexpr,
    SELECT: tl.constexpr,  # see `eight_bit.to_fp32`
    # The norm multiplies by (1 + w).
    ONE_PLUS: tl.constexpr,
    # Whether numbers are read in pairs. This needs 16-bit numbers, tensors aligned to 4 bytes, and an even K.
    PAIRS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute BLOCK_N columns of the result for one row of x, without matrix instructions.

    The norm's division is the same for all elements, so it is applied to the sums, and the normalised x is not rounded.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, n_size - 1)[:, None].to(tl.int64)
    row_scale = None if GROUP else scale
    if PAIRS:
        tl.static_assert(scale is None)
        sums, ups, squares = multiply_pairs(
            x, weight, norm_weight, rows, n_size, k_size, ACTIVATION, EVEN, ONE_PLUS, AHEAD, BLOCK_N, BLOCK_K
        )
        k_size *= 2
    else:
        sums, ups, squares = _multiply(
            x,
            weight,
            scale,
            norm_weight,
            rows,
            n_size,
            k_size,
            ACTIVATION,
            EVEN,
            GROUP,
            SELECT,
            ONE_PLUS,
            BLOCK_N,
            BLOCK_K,
        )
    sums, ups = sums[None, :], ups[None, :]
    if norm_weight is not None:
        divided = tl.rsqrt(squares[:, None] / k_size + eps)
        sums, ups = sums * divided, ups * divided
    m = tl.arange(0, 1)
    write_result(sums, ups, row_scale, bias, residual, out, m, n, m_size, n_size, ACTIVATION, 1)


@triton.jit
def _multiply(
    x,
    weight,
    scale,
    norm_weight,
    rows,
    n_size,
    k_size,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    SELECT: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`multiply_pairs` for numbers of any size."""
    columns = tl.arange(0, BLOCK_K)[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    scales, up_scales, block = scale, scale, 0
    if GROUP:
        block = tl.arange(0, BLOCK_K // GROUP)[None, :, None]
        columns = block * GROUP + tl.arange(0, GROUP)[None, None, :]
        rows = rows[:, :, None]
        scales, up_scales = _scales(scale, block, n_size, k_size, GROUP, BLOCK_N)
        sums = tl.zeros([BLOCK_N, BLOCK_K // GROUP, GROUP], tl.float32)
    x += columns
    if norm_weight is not None:
        tl.static_assert(GROUP == 0)
        norm_weight += columns
    # at most 8 numbers per load, as for x: otherwise x would pass through shared memory in every iteration
    weight += rows * k_size + tl.max_contiguous(columns, (1, 1, 8) if GROUP else (1, 8))
    up_offset = n_size.to(tl.int64) * k_size
    ups = sums
    squares = tl.zeros(columns.shape, tl.float32)
    for k in tl.range(0, k_size, BLOCK_K):
        inside = columns < k_size - k
        first = read_once(weight + k, inside, EVEN)
        if ACTIVATION is not None:
            second = read_once(weight + up_offset + k, inside, EVEN)
        plain = piece(x + k, inside, EVEN).to(tl.float32)
        values = plain
        if norm_weight is not None:
            factors = piece(norm_weight + k, inside, EVEN).to(tl.float32)
            values *= 1.0 + factors if ONE_PLUS else factors
        block_inside = block * GROUP < k_size - k
        sums += to_fp32(first, SELECT) * _scaled(values, scales, k, block_inside, EVEN, GROUP)
        if ACTIVATION is not None:
            ups += to_fp32(second, SELECT) * _scaled(values, up_scales, k, block_inside, EVEN, GROUP)
        if norm_weight is not None:
            # Squares are added last, so that the weights in flight keep their registers.
            squares += plain * plain
    if GROUP:
        sums, ups = tl.sum(sums, 2), tl.sum(ups, 2)
    return tl.sum(sums, 1), tl.sum(ups, 1), tl.sum(squares, 1)


@triton.jit
def few_rows(
    x,  # [M, K]
    # This and the following arguments are as in `matrix_vector`, but residual and out are [M, N].
    weight,
    scale,
    bias,
    residual,
    out,
    m_size,
    n_size,
    k_size,
    ACTIVATION: tl.constexpr,
    # K is a multiple of SPLITS · BLOCK_K.
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,  # 0 or BLOCK_K
    SELECT: tl.constexpr,  # see `eight_bit.to_fp32`
    # If more than 1, out is [PARTS, M, N] in fp32, for `sum_parts`.
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`matrix_vector` for more rows, with matrix instructions: BLOCK_N rows of W times BLOCK_M rows of x, transposed.

    K is split over PARTS programs, and in each program over SPLITS groups of warps.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.minimum(n, n_size - 1)[:, None].to(tl.int64) * k_size
    across = tl.arange(0, BLOCK_K)[None, :]
    down = tl.arange(0, BLOCK_K)[:, None]
    x += m[None, :].to(tl.int64) * k_size
    valid = (m < m_size)[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if SPLITS > 1:
        part = tl.arange(0, SPLITS)[:, None, None] * BLOCK_K
        rows, across, down, valid = rows[None], part + across[None], part + down[None], valid[None]
        sums = tl.zeros([SPLITS, BLOCK_N, BLOCK_M], tl.float32)
    x += down
    weight += rows + across
    up_offset = n_size.to(tl.int64) * k_size
    ups = sums
    scales, up_scales, block = scale, scale, 0
    if GROUP:
        tl.static_assert(GROUP == BLOCK_K)
        if SPLITS > 1:
            block = tl.arange(0, SPLITS)[:, None, None]
        scales, up_scales = _scales(scale, block, n_size, k_size, GROUP, BLOCK_N)
    begin, end = part_of(k_size, SPLITS * BLOCK_K, PARTS)
    for k in tl.range(begin, end, SPLITS * BLOCK_K):
        first = piece(weight + k, across < k_size - k, EVEN)
        values = tl.load(x + k, mask=valid if EVEN else valid & (down < k_size - k), other=0.0)
        block_inside = block * GROUP < k_size - k
        sums = _multiply_add(sums, first, values, scales, k, block_inside, EVEN, GROUP, SELECT)
        if ACTIVATION is not None:
            second = piece(weight + up_offset + k, across < k_size - k, EVEN)
            ups = _multiply_add(ups, second, values, up_scales, k, block_inside, EVEN, GROUP, SELECT)
    if SPLITS > 1:
        sums, ups = tl.sum(sums, 0), tl.sum(ups, 0)
    row_scale = None if GROUP else scale
    sums, ups = tl.trans(sums), tl.trans(ups)
    write_result(sums, ups, row_scale, bias, residual, out, m, n, m_size, n_size, ACTIVATION, PARTS)


@triton.jit
def sum_parts(
    parts,  # [PARTS, M, N] in fp32
    scale,
    bias,
    residual,
    out,  # [M, N]
    m_size,
    n_size,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the partial sums of a GEMM in order, then apply the scale, the bias and the residual sum."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.program_id(1) + tl.arange(0, 1)
    parts += tl.program_id(1).to(tl.int64) * n_size + n
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * m_size.to(tl.int64) * n_size, mask=n < n_size, other=0.0)
    product = finished(total[None, :], scale, bias, n, n_size, out.dtype.element_ty)
    store(product, residual, out, m, n, m_size, n_size)


@triton.jit
def part_of(k_size, STEP: tl.constexpr, PARTS: tl.constexpr):
    """The range of K that a program processes: its first index, and the index after its last one."""
    if PARTS == 1:
        return 0, k_size
    else:
        length = tl.cdiv(tl.cdiv(k_size, STEP), PARTS) * STEP
        begin = tl.program_id(2) * length
        return begin, tl.minimum(begin + length, k_size)


@triton.jit
def _scales(scale, block, n_size, k_size, GROUP: tl.constexpr, BLOCK_N: tl.constexpr):
    """The addresses of the block scales of a program's rows, and of its rows in the second half of W."""
    count = tl.cdiv(k_size, GROUP)
    first = scale + tl.program_id(0) * BLOCK_N // GROUP * count + block
    return first, first + n_size // GROUP * count


@triton.jit
def _scaled(values, scales, k, inside, EVEN: tl.constexpr, GROUP: tl.constexpr):
    """Numbers of x, multiplied by the scale of the corresponding block of W, if blocks have scales."""
    if GROUP:
        return values * piece(scales + k // GROUP, inside, EVEN)
    return values


@triton.jit
def _multiply_add(
    sums, numbers, values, scales, k, inside, EVEN: tl.constexpr, GROUP: tl.constexpr, SELECT: tl.constexpr
):
    """Add `tl.dot` of the weight's numbers and x, multiplied by the block's scale if blocks have scales."""
    if GROUP:
        part = tl.dot(to_dtype_of(numbers, values, SELECT), values)
        return sums + part * piece(scales + k // GROUP, inside, EVEN)
    return tl.dot(to_dtype_of(numbers, values, SELECT), values, sums)


def _build(
    rows: int,
    n: int,
    *,
    weight: str = "bf16",
    group: int = 0,
    activation: str | None = None,
    residual: bool = False,
    norm: bool = False,
    one_plus: bool = False,
    units: int = 0,
    arch: str | None = None,
) -> Build:
    """The build for bf16 inputs on AMD GPUs.

    units: as in `eight_bit_tile`. arch: the only architecture to build for; None: all that support this kernel.
    """
    scale = "fp32" if weight != "bf16" else ""
    tensors = {"x": "bf16", "weight": weight, "scale": scale, "bias": "", "residual": "bf16" * residual, "out": "bf16"}
    gated = activation is not None
    # 8 bits with a gate or blocks are refused on RDNA 3; see `triton.quantized`
    refused = GFX11 if scale and (gated or group) else ()
    served = tuple(gfx for gfx in ARCHITECTURES if gfx not in refused)
    tile = linear_tile(rows, n, 4096, gated, rocm=True, arch=arch)
    sizes: dict[str, str] = dict.fromkeys(("m_size", "n_size", "k_size"), "i32")
    if scale:
        tile = eight_bit_tile(rows, n, gated, rocm=True, units=units)
        tensors["out"] = "fp32" if tile.parts > 1 else "bf16"
    further: dict[str, Any] = {}
    pairs = weight == "bf16"
    if not tile.matrix:
        tensors["norm_weight"] = "bf16" * norm
        sizes["eps"] = "fp32"
        further |= {"ONE_PLUS": one_plus, "PAIRS": pairs, "AHEAD": pairs and tile.ahead}
    return Build(
        few_rows if tile.matrix else matrix_vector,
        {**{name: f"*{dtype}" for name, dtype in tensors.items() if dtype}, **sizes},
        {
            **{name: None for name, dtype in tensors.items() if not dtype},
            "ACTIVATION": activation,
            "EVEN": True,
            "GROUP": group,
            "SELECT": AMD if scale else None,
            **further,
            **tile.constants(),
        },
        threads=tile.threads,
        num_stages=tile.stages,
        divisible=("n_size", "k_size"),
        matrix=tile.matrix,
        architectures=served if arch is None else (arch,),
    )


def _sum(parts: int, *, scale: bool, dtype: str = "bf16") -> Build:
    return Build(
        sum_parts,
        {
            "parts": "*fp32",
            **({"scale": "*fp32"} if scale else {}),
            **{name: f"*{dtype}" for name in ("residual", "out")},
            **dict.fromkeys(("m_size", "n_size"), "i32"),
        },
        {**({} if scale else {"scale": None}), "bias": None, "PARTS": parts, "BLOCK": 512},
        divisible=("n_size",),
    )


BUILDS = (
    _build(1, 6144),
    _build(1, 6144, norm=True),
    _build(1, 4096, norm=True, one_plus=True),
    *(_build(1, 4096, residual=True, arch=arch) for arch in (None, "gfx942", "gfx950")),
    _build(1, 14336, activation="silu", norm=True),
    _build(1, 14336, activation="gelu_tanh"),
    *(_build(rows, 6144, arch=arch) for rows in (8, 32) for arch in ARCHITECTURES),
    _build(8, 4096, residual=True),
    _build(8, 14336, activation="silu"),
    _build(32, 4096, residual=True),
    _build(32, 14336, activation="silu"),
    _build(1, 6144, weight="fp8e4nv"),
    _build(1, 14336, weight="i8", activation="silu"),
    _build(8, 4096, weight="fp8e4nv", residual=True),
    _build(8, 14336, weight="fp8e4nv", activation="silu"),
    _build(8, 6144, weight="i8"),
    _build(64, 6144, weight="i8"),
    _build(64, 1024, weight="i8", units=304),
    _sum(4, scale=True),
    _sum(4, scale=False, dtype="fp16"),
    _build(1, 6144, weight="fp8e4b8", arch="gfx942"),
    _build(8, 6144, weight="fp8e4b8", arch="gfx942"),
    _build(1, 6144, weight="fp8e4nv", group=128),
    _build(1, 14336, weight="fp8e4nv", group=128, activation="silu"),
    _build(8, 4096, weight="fp8e4nv", group=128, residual=True),
    _build(8, 14336, weight="fp8e4nv", group=128, activation="silu"),
    _build(64, 6144, weight="fp8e4nv", group=128),
)
