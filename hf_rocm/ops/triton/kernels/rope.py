"""Apply rotary embeddings to queries and keys in one launch, and optionally write keys and values to a static cache.

A program rotates some heads of one token, after their norm if there is one. Each product is rounded, as in the unfused
layers, and the compiler must not fuse it with the following sum, so that the rotations are bitwise equal to those of
the unfused layers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build
from hf_rocm.ops.triton.kernels.rotation import normed


@triton.jit
def _pairs(at, valid, PAIRS: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr):
    """Load the first and the second element of each pair, [HEADS, PAIRS] each, in fp32. at, valid: [HEADS, 1]."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.load(at + column, mask=valid & (column < ROTATED), other=0.0)
        first, second = tl.split(tl.reshape(both, (HEADS, PAIRS, 2)))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        first = tl.load(at + pair, mask=valid & (pair < ROTATED // 2), other=0.0)
        second = tl.load(at + pair + ROTATED // 2, mask=valid & (pair < ROTATED // 2), other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _rotate(
    x,
    x_head,
    out,
    out_head,
    cos,
    sin,
    weight,
    eps,
    first_head,
    writes,
    shown,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    ONCE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotate BLOCK_HEADS heads of one token. writes: whether to store them. shown: False to store NaN instead."""
    dtype: tl.constexpr = out.dtype.element_ty
    # The offset of a head in a long cache may exceed 32 bits.
    head = first_head + tl.arange(0, BLOCK_HEADS)[:, None].to(tl.int64)
    valid = head < HEADS
    always = tl.full((1, 1), True, tl.int1)
    nothing = tl.zeros((1, 1), tl.int32)
    a, b = _pairs(x + head * x_head, valid, PAIRS, ROTATED, INTERLEAVED, BLOCK_HEADS)
    if ROTATED < DIM:
        column = ROTATED + tl.arange(0, REST)[None, :]
        rest = tl.load(x + head * x_head + column, mask=valid & (column < DIM), other=0.0).to(tl.float32)
    if ONCE:
        pair = tl.arange(0, PAIRS)[None, :]
        cos_a = tl.load(cos + pair, mask=pair < ROTATED // 2, other=0.0).to(tl.float32)
        sin_a = tl.load(sin + pair, mask=pair < ROTATED // 2, other=0.0).to(tl.float32)
        cos_b, sin_b = cos_a, sin_a
    else:
        cos_a, cos_b = _pairs(cos + nothing, always, PAIRS, ROTATED, INTERLEAVED, 1)
        sin_a, sin_b = _pairs(sin + nothing, always, PAIRS, ROTATED, INTERLEAVED, 1)
    if weight is not None:
        # loaded before the sums, as in `rms_norm_kernel`
        weight_a, weight_b = _pairs(weight + nothing, always, PAIRS, ROTATED, INTERLEAVED, 1)
        if ROTATED < DIM:
            rest_weight = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if ROTATED < DIM:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        a, b = normed(a, scale, weight_a, dtype, ONE_PLUS), normed(b, scale, weight_b, dtype, ONE_PLUS)
        if ROTATED < DIM:
            rest = normed(rest, scale, rest_weight, dtype, ONE_PLUS)
    rotated_a = (a * cos_a).to(dtype).to(tl.float32) - (b * sin_a).to(dtype).to(tl.float32)
    rotated_b = (b * cos_b).to(dtype).to(tl.float32) + (a * sin_b).to(dtype).to(tl.float32)
    rotated_a = tl.where(shown, rotated_a, float("nan")).to(dtype)
    rotated_b = tl.where(shown, rotated_b, float("nan")).to(dtype)
    target = out + head * out_head
    if INTERLEAVED:
        both = tl.reshape(tl.join(rotated_a, rotated_b), (BLOCK_HEADS, 2 * PAIRS))
        at = tl.arange(0, 2 * PAIRS)[None, :]
        tl.store(target + at, both, mask=valid & (at < ROTATED) & writes)
    else:
        at = tl.arange(0, PAIRS)[None, :]
        tl.store(target + at, rotated_a, mask=valid & (at < ROTATED // 2) & writes)
        tl.store(target + at + ROTATED // 2, rotated_b, mask=valid & (at < ROTATED // 2) & writes)
    if ROTATED < DIM:
        rest = tl.where(shown, rest, float("nan")).to(dtype)
        tl.store(target + column, rest, mask=valid & (column < DIM) & writes)


@triton.jit
def _copy(
    x,
    x_head,
    out,
    out_head,
    first,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    writes,
):
    head = first + tl.arange(0, BLOCK_HEADS)[:, None].to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    valid = (head < HEADS) & (column < DIM)
    value = tl.load(x + head * x_head + column, mask=valid, other=0.0)
    tl.store(out + head * out_head + column, value, mask=valid & writes)


@triton.jit
def rope_kernel(
    query,
    key,
    # None: no values are written.
    value,
    cos,
    sin,
    out,
    keys,
    values,
    # None: token i is written to row i.
    position,
    query_weight,  # [D], the weight of the norm of queries, or None
    key_weight,
    query_eps,
    key_eps,
    length,
    cache_rows,
    query_batch,
    query_head,
    query_token,
    key_batch,
    key_head,
    key_token,
    value_batch,
    value_head,
    value_token,
    angle_batch,
    out_batch,
    out_head,
    out_token,
    keys_batch,
    keys_head,
    keys_token,
    values_batch,
    values_head,
    values_token,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    # The norms multiply by (1 + w).
    ONE_PLUS: tl.constexpr,
    # cos and sin contain each angle once.
    ONCE: tl.constexpr,
    # position is the number of earlier tokens; otherwise, it contains each token's position.
    COUNTED: tl.constexpr,
    # One program does everything, and advances the position if COUNTED.
    ALONE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    batch = (tl.program_id(0) // length).to(tl.int64)
    token = (tl.program_id(0) % length).to(tl.int64)
    block = tl.program_id(1)
    query_blocks: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    place = token
    if position is not None:
        if COUNTED:
            place = tl.load(position).to(tl.int64) + token
        else:
            place = tl.load(position + token).to(tl.int64)
    # a token outside the cache is not written, and its query is NaN, so that the error is visible
    inside = (place >= 0) & (place < cache_rows)
    angles = batch * angle_batch + token * (ROTATED // 2 if ONCE else ROTATED)
    if ALONE or block < query_blocks:
        _rotate(
            query + batch * query_batch + token * query_token,
            query_head,
            out + batch * out_batch + token * out_token,
            out_head,
            cos + angles,
            sin + angles,
            query_weight,
            query_eps,
            block * BLOCK_HEADS,
            True,
            inside,
            HEADS,
            DIM,
            ROTATED,
            INTERLEAVED,
            ONE_PLUS,
            ONCE,
            BLOCK_HEADS,
            PAIRS,
            REST,
        )
    if ALONE or block >= query_blocks:
        first = 0 if ALONE else (block - query_blocks) * BLOCK_KV
        _rotate(
            key + batch * key_batch + token * key_token,
            key_head,
            keys + batch * keys_batch + place * keys_token,
            keys_head,
            cos + angles,
            sin + angles,
            key_weight,
            key_eps,
            first,
            inside,
            True,
            KV_HEADS,
            DIM,
            ROTATED,
            INTERLEAVED,
            ONE_PLUS,
            ONCE,
            BLOCK_KV,
            PAIRS,
            REST,
        )
        if value is not None:
            _copy(
                value + batch * value_batch + token * value_token,
                value_head,
                values + batch * values_batch + place * values_token,
                values_head,
                first,
                KV_HEADS,
                VALUE_DIM,
                BLOCK_KV,
                BLOCK_VALUE,
                inside,
            )
    if ALONE and COUNTED:
        tl.debug_barrier()
        tl.store(position, place + 1)


def _build(
    heads: int,
    kv_heads: int,
    dim: int,
    rotated: int,
    *,
    cached: bool,
    placed: bool = True,
    alone: bool = False,
    interleaved: bool = False,
    norm: bool = False,
    one_plus: bool = False,
    once: bool = False,
    dtype: str = "bf16",
) -> Build:
    weights = ["query_weight", "key_weight"]
    tensors = ["query", "key", "cos", "sin", "out", "keys", *(["value", "values"] if cached else [])]
    tensors += weights if norm else []
    strides = [f"{name}_{axis}" for name in ("query", "key", "value") for axis in ("batch", "head", "token")]
    strides += ["angle_batch"]
    strides += [f"{name}_{axis}" for name in ("out", "keys", "values") for axis in ("batch", "head", "token")]
    sizes = ["length", "cache_rows", *strides]
    if alone:
        sizes.remove("length")
    absent = {} if cached else {"value": None, "values": None}
    absent |= {} if cached and placed else {"position": None}
    absent |= {} if norm else dict.fromkeys(weights)
    block_heads = triton.next_power_of_2(heads) if alone else 16
    return Build(
        rope_kernel,
        {
            **{name: f"*{dtype}" for name in tensors},
            **({"position": "*i64"} if cached and placed else {}),
            **dict.fromkeys(("query_eps", "key_eps"), "fp32"),
            **dict.fromkeys(sizes, "i32"),
        },
        {
            **absent,
            **({"length": 1} if alone else {}),
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "DIM": dim,
            "VALUE_DIM": dim,
            "ROTATED": rotated,
            "INTERLEAVED": interleaved,
            "ONE_PLUS": one_plus,
            "ONCE": once,
            "COUNTED": cached and placed,
            "ALONE": alone,
            "BLOCK_HEADS": block_heads,
            "BLOCK_KV": min(block_heads, triton.next_power_of_2(kv_heads)),
            "PAIRS": triton.next_power_of_2(rotated // 2),
            "REST": triton.next_power_of_2(max(1, dim - rotated)),
            "BLOCK_VALUE": triton.next_power_of_2(dim),
        },
        threads=256,
        divisible=tuple(strides),
        options={"enable_fp_fusion": False},
    )


BUILDS = (
    _build(32, 8, 128, 128, cached=False),
    _build(32, 8, 128, 128, cached=True),
    # Prompts.
    _build(32, 8, 128, 128, cached=True, placed=False),
    _build(32, 8, 128, 128, cached=True, alone=True),
    _build(32, 8, 128, 128, cached=True, norm=True),
    _build(32, 8, 128, 128, cached=True, alone=True, norm=True),  # Qwen3
    _build(8, 4, 256, 256, cached=True, alone=True, norm=True, one_plus=True),  # Gemma 3
    _build(64, 8, 64, 64, cached=True, alone=True, once=True),  # gpt-oss
    _build(16, 8, 256, 256, cached=True, dtype="fp16"),
    _build(32, 2, 128, 64, cached=True, interleaved=True),
    _build(32, 32, 80, 32, cached=False, dtype="fp32"),
)
