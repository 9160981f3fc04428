"""Attention for many queries: softmax and GEMMs in one pass over the keys, for dense and for packed sequences.

A program processes a tile of rows, in which the query heads of one key/value head are adjacent, so that keys and values
are loaded once for the whole group. Packed sequences need no list of tiles: the tiles of sequence b begin at a number
that increases with b and can be computed from the sequence's first query, so a program finds its sequence by bisection.
Scores are scaled for exp2. Without a window, blocks of keys to which every row of the tile attends are not masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import ARCHITECTURES, GFX11, Build
from hf_rocm.ops.triton.tiles import flash_tile

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["sequences", "span", "queries", "keys"])
def flash_kernel(
    query,  # [B, H, S_q, D]; packed: B = 1 and S_q = T_q
    key,  # [B, Hkv, S_k, D]
    value,  # [B, Hkv, S_k, D_v]
    output,  # [B, S_q, H, D_v]
    lse,  # [B, S_q, H] fp32 or None
    query_ends,  # [sequences + 1] int32, or None: dense
    key_ends,  # [sequences + 1] int32, or None: dense
    sinks,  # [H] or None
    scale,
    softcap,  # or None
    sequences,
    # A power of 2, at least half the number of sequences.
    span,
    queries,  # S_q, if dense
    keys,  # S_k, if dense
    window,  # or None
    query_b,
    query_h,
    query_s,
    key_b,
    key_h,
    key_s,
    value_b,
    value_h,
    value_s,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Process one tile of rows (query i, member of the group) of one key/value head."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    if query_ends is not None:
        sequence = 0
        step = span
        while step > 0:
            candidate = sequence + step
            inside = candidate < sequences
            begins = tl.load(query_ends + candidate, mask=inside, other=0)
            sequence = tl.where(inside & (begins * GROUP // ROWS + candidate <= tile), candidate, sequence)
            step = step // 2
        first_query = tl.load(query_ends + sequence)
        first_key = tl.load(key_ends + sequence).to(tl.int64)
        queries = tl.load(query_ends + sequence + 1) - first_query
        keys = (tl.load(key_ends + sequence + 1) - first_key).to(tl.int32)
        tile = tile - (first_query * GROUP // ROWS + sequence)
        first_query = first_query.to(tl.int64)
        key += first_key * key_s
        value += first_key * value_s
    else:
        # Start with the rows that attend to the most keys.
        tile = tl.num_programs(0) - 1 - tile
        first_query = b * queries
        query -= first_query * query_s
    if tile * ROWS >= queries * GROUP:
        return

    row = tile * ROWS + tl.arange(0, ROWS)
    real = row < queries * GROUP
    i = row // GROUP
    h = kv_head * GROUP + row % GROUP
    at = first_query + i  # [ROWS]
    # The queries occupy the last positions of the keys.
    first_position = keys - queries
    position = first_position + i
    lowest = first_position + tile * ROWS // GROUP
    first = 0
    end = keys
    unmasked_end = keys
    if CAUSAL:
        highest = first_position + (tl.minimum(tile * ROWS + ROWS, queries * GROUP) - 1) // GROUP
        end = tl.minimum(end, highest + 1)
        unmasked_end = tl.minimum(unmasked_end, lowest + 1)
    if window is not None:
        first = tl.maximum(lowest - window + 1, 0) // BLOCK * BLOCK
        unmasked_end = first
    else:
        unmasked_end = tl.maximum(unmasked_end, 0) // BLOCK * BLOCK

    column = tl.arange(0, BLOCK_D)
    value_column = tl.arange(0, BLOCK_V)
    query += b * query_b + h[:, None].to(tl.int64) * query_h + at[:, None] * query_s
    q = tl.load(query + column[None, :], mask=real[:, None] & (column < DIM)[None, :], other=0.0)
    key += b * key_b + kv_head.to(tl.int64) * key_h
    value += b * value_b + kv_head.to(tl.int64) * value_h
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, BLOCK_V], tl.float32)
    if window is None:
        peak, total, sums = _attend(
            q,
            peak,
            total,
            sums,
            key,
            value,
            first,
            unmasked_end,
            position,
            window,
            scale,
            softcap,
            key_s,
            value_s,
            DIM,
            VALUE_DIM,
            CAUSAL,
            False,
            PRECISION,
            BLOCK,
            BLOCK_D,
            BLOCK_V,
        )
    peak, total, sums = _attend(
        q,
        peak,
        total,
        sums,
        key,
        value,
        unmasked_end,
        end,
        position,
        window,
        scale,
        softcap,
        key_s,
        value_s,
        DIM,
        VALUE_DIM,
        CAUSAL,
        True,
        PRECISION,
        BLOCK,
        BLOCK_D,
        BLOCK_V,
    )
    if sinks is not None:
        sink = tl.load(sinks + h, mask=real, other=0.0).to(tl.float32) * LOG2E
        level = tl.maximum(peak, sink)
        rescale = tl.exp2(peak - level)
        total = total * rescale + tl.exp2(sink - level)
        sums = sums * rescale[:, None]
        peak = level
    if lse is not None:
        tl.store(lse + at * HEADS + h, (peak + tl.log2(total)) / LOG2E, mask=real)
    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    address = output + (at[:, None] * HEADS + h[:, None]) * VALUE_DIM + value_column[None, :]
    kept = real[:, None] & (value_column < VALUE_DIM)[None, :]
    tl.store(address, result.to(output.dtype.element_ty), mask=kept)


@triton.jit
def _attend(
    q,
    peak,
    total,
    sums,
    key,
    value,
    begin,
    end,
    position,
    window,
    scale,
    softcap,
    key_s,
    value_s,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Attend to the keys from `begin` to `end` for one tile. MASKED: whether rows may attend to only some of them."""
    n = tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK_D)
    value_column = tl.arange(0, BLOCK_V)
    for block in tl.range(begin, end, BLOCK):
        at = block + n
        clamped = n
        # The last key is read again instead of keys after it, so that loads need no masks.
        if MASKED:
            clamped = tl.minimum(n, end - 1 - block)
        address = key + tl.cast(block, tl.int64) * key_s + clamped[None, :] * key_s + column[:, None]
        if DIM == BLOCK_D:
            k = tl.load(address)
        else:
            k = tl.load(address, mask=(column < DIM)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION)
        if softcap is not None:
            # tanh in terms of exp2, which every backend has; exactly ±1 for large scores
            scores = softcap * LOG2E * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (scale / softcap * (2.0 * LOG2E)))))
        else:
            scores = scores * (scale * LOG2E)
        if MASKED:
            seen = (at < end)[None, :]
            if CAUSAL:
                seen = seen & (at[None, :] <= position[:, None])
            if window is not None:
                seen = seen & (at[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        level = higher
        if MASKED:
            # -inf means that all keys so far were masked.
            level = tl.where(higher == -float("inf"), 0.0, higher)
        exponentials = tl.exp2(scores - level[:, None])
        rescale = tl.exp2(peak - level)
        total = total * rescale + tl.sum(exponentials, 1)
        peak = higher
        address = value + tl.cast(block, tl.int64) * value_s + clamped[:, None] * value_s + value_column[None, :]
        if VALUE_DIM == BLOCK_V:
            v = tl.load(address)
        else:
            v = tl.load(address, mask=(value_column < VALUE_DIM)[None, :], other=0.0)
        sums = sums * rescale[:, None] + tl.dot(exponentials.to(v.dtype), v, input_precision=PRECISION)
    return peak, total, sums


CDNA = tuple(gfx for gfx in ARCHITECTURES if gfx.startswith("gfx9"))
GFX12 = tuple(gfx for gfx in ARCHITECTURES if gfx.startswith("gfx12"))


def _builds(
    dim: int,
    group: int,
    *,
    dtype: str = "bf16",
    value_dim: int | None = None,
    packed: bool = True,
    causal: bool = True,
    window: bool = False,
    softcap: bool = False,
    sinks: bool = False,
    lse: bool = False,
) -> Iterator[Build]:
    """Builds for CDNA, gfx11 and gfx12, whose tiles differ. Head dims above 128 are refused on gfx11."""
    strides = ("query_b", "query_h", "query_s", "key_b", "key_h", "key_s", "value_b", "value_h", "value_s")
    value_dim = value_dim or dim
    types = {name: f"*{dtype}" for name in ("query", "key", "value", "output", "sinks")}
    types |= {"lse": "*fp32", "query_ends": "*i32", "key_ends": "*i32", "scale": "fp32", "softcap": "fp32"}
    types |= dict.fromkeys(("sequences", "span", "queries", "keys", "window", *strides), "i32")
    absent = {
        "lse": not lse,
        "query_ends": not packed,
        "key_ends": not packed,
        "sinks": not sinks,
        "softcap": not softcap,
        "window": not window,
    }
    fixed: dict[str, Any] = {name: None for name, is_absent in absent.items() if is_absent}
    for architectures in (CDNA, GFX11, GFX12):
        tile = flash_tile(max(dim, value_dim), 4 if dtype == "fp32" else 2, architectures[0])
        yield Build(
            flash_kernel,
            {name: kind for name, kind in types.items() if name not in fixed},
            {
                **fixed,
                "HEADS": 8 * group,
                "GROUP": group,
                "DIM": dim,
                "VALUE_DIM": value_dim,
                "CAUSAL": causal,
                "PRECISION": "ieee" if dtype == "fp32" else None,
                "ROWS": tile.rows,
                "BLOCK": tile.keys,
                "BLOCK_D": triton.next_power_of_2(dim),
                "BLOCK_V": triton.next_power_of_2(value_dim),
            },
            num_warps=tile.warps,
            num_stages=tile.stages,
            divisible=strides,
            matrix=True,
            architectures=() if architectures is GFX11 and max(dim, value_dim) > 128 else architectures,
        )


BUILDS = (
    *_builds(128, 4),  # Llama, Mistral, Qwen
    *_builds(128, 7, packed=False, causal=False),
    *_builds(64, 8, dtype="fp16", window=True, sinks=True),  # gpt-oss
    *_builds(64, 8, sinks=True, lse=True),
    *_builds(256, 2, softcap=True, window=True),  # Gemma
    *_builds(256, 2, softcap=True),
    *_builds(96, 1, packed=False),  # Phi
    *_builds(192, 1, value_dim=128),  # DeepSeek
)
