"""Products of a vector and rows of a matrix with numbers of 16 bits, which are read in pairs, as words of 32 bits.

The compiler converts a block of 16-bit numbers as soon as it is loaded, so a program waits for the block, and keeps it
in twice as many registers. Words are converted when they are multiplied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build
from hf_rocm.ops.triton.kernels.pieces import piece, read_once

WORD = tl.constexpr(tl.pointer_type(tl.int32))


@triton.jit
def multiply_pairs(
    x,  # [1, K]
    weight,  # [N, K], with a gate [2N, K]
    norm_weight,  # [K] or None
    # The rows of weight that this program reads, [BLOCK_N, 1] int64.
    rows,
    n_size,
    # K / 2
    words,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The products of x with these rows, with the rows of the second half of weight, and of x with itself.

    If there is a norm, x is multiplied by its weight in the first two products. Without a gate, the second product is
    zero. AHEAD: the next block is loaded before the current one is multiplied; only without a gate. Returns [N], [N]
    and [1] in fp32.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    size: tl.constexpr = BLOCK_K // 2
    columns = tl.arange(0, size)[None, :]
    weight = weight.to(WORD, bitcast=True) + (rows * words + tl.max_contiguous(columns, (1, 4)))
    up = weight + n_size.to(tl.int64) * words
    x = x.to(WORD, bitcast=True) + columns
    if norm_weight is not None:
        norm_weight = norm_weight.to(WORD, bitcast=True) + columns
    sums = tl.zeros([BLOCK_N, size // 4], tl.float32)
    ups = sums
    squares = tl.zeros([1, size // 4], tl.float32)
    if AHEAD:
        tl.static_assert(ACTIVATION is None)
        first = read_once(weight, columns < words, EVEN)
    for k in tl.range(0, words, size):
        inside = columns < words - k
        if AHEAD:
            following = read_once(weight + (k + size), columns < words - k - size, False)
        else:
            first = read_once(weight + k, inside, EVEN)
        if ACTIVATION is not None:
            second = read_once(up + k, inside, EVEN)
        pairs = piece(x + k, inside, EVEN)
        even, odd = low(pairs, dtype), high(pairs, dtype)
        if norm_weight is not None:
            squares += sum_of_four(even * even + odd * odd)
            factors = piece(norm_weight + k, inside, EVEN)
            if ONE_PLUS:
                even, odd = even * (1.0 + low(factors, dtype)), odd * (1.0 + high(factors, dtype))
            else:
                even, odd = even * low(factors, dtype), odd * high(factors, dtype)
        sums += sum_of_four(low(first, dtype) * even + high(first, dtype) * odd)
        if ACTIVATION is not None:
            ups += sum_of_four(low(second, dtype) * even + high(second, dtype) * odd)
        if AHEAD:
            first = following
    return tl.sum(sums, 1), tl.sum(ups, 1), tl.sum(squares, 1)


@triton.jit
def low(words, dtype: tl.constexpr):
    """The number in the lower half of every word, which is the first of the pair, in fp32."""
    if dtype == tl.bfloat16:
        return (words << 16).to(tl.float32, bitcast=True)
    return words.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def high(words, dtype: tl.constexpr):
    """The second number of every pair, in fp32."""
    if dtype == tl.bfloat16:
        return (words & -65536).to(tl.float32, bitcast=True)
    return (words >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def sum_of_four(products):
    """Add the products of every four words, which one thread has, so that the sums need fewer registers.

    products: [N, W] or [E, N, W].
    """
    last: tl.constexpr = len(products.shape) - 1
    size: tl.constexpr = products.shape[last]
    if last == 1:
        return tl.sum(tl.reshape(products, [products.shape[0], size // 4, 4]), 2)
    else:
        return tl.sum(tl.reshape(products, [products.shape[0], products.shape[1], size // 4, 4]), 3)


# Other kernels call the functions of this module.
BUILDS: tuple[Build, ...] = ()
