"""Decode attention, split along the keys: partial softmaxes in fp32, which `gather_kernel` combines.

A step has B · Hkv independent pieces of work, too few for a GPU with hundreds of compute units. So the keys of a piece
are split into blocks, which are distributed across several programs. A program reads `lengths` to compute its blocks,
and returns at once if it has none. Scores are scaled for exp2. With `new_key`, the kernel also normalises and rotates
the queries and the new keys, and writes the keys and the values to the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl

from hf_rocm.ops.specs.attention import FEW_QUERIES
from hf_rocm.ops.triton.builds import ARCHITECTURES, GFX11, Build
from hf_rocm.ops.triton.kernels.rotation import rotated_rows
from hf_rocm.ops.triton.tiles import plan

LOG2E = tl.constexpr(1.4426950408889634)
# The largest number of new keys; at least 16, the smallest number of columns for tl.dot.
NEW = tl.constexpr(FEW_QUERIES)


# The length of a dynamic cache grows with every token.
@triton.jit(do_not_specialize=["keys"])
def decode_kernel(
    query,  # [B, H, S_q, D]
    key,  # [B, Hkv, S, D]; in pages [P, Hkv, PAGE, D]
    value,  # [B, Hkv, S, D_v]; in pages [P, Hkv, PAGE, D_v]
    # If ALONE the result, [B, S_q, H, D_v]; else fp32, for `gather_kernel`.
    output,
    lengths,  # [B] or [1], or None: S keys
    starts,  # [B] or None
    mask,  # [B | 1, H | 1, S_q | 1, 1 | ≥ S] or None
    sinks,  # [H] or None; used here only if ALONE
    table,  # [B, S / PAGE], the pages of each row; or None
    new_key,  # [B, Hkv, S_q, D], the last keys before their norm and rotation; None if they are in the cache
    new_value,  # [B, Hkv, S_q, D_v]
    cos,  # [B | 1, S_q, R], or [B | 1, S_q, R / 2] if ONCE
    sin,
    place,  # [S_q], the rows to which the new keys are written; if they are not the last ones, the result is NaN
    query_weight,  # [D], the weight of the norm of queries, or None
    key_weight,
    scale,
    softcap,  # or None
    query_eps,
    key_eps,
    keys,  # S
    queries,  # S_q
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
    mask_b,
    mask_h,
    mask_q,
    mask_k,
    length_b,  # 0: one length for all
    table_b,
    new_key_b,
    new_key_h,
    new_key_s,
    new_value_b,
    new_value_h,
    new_value_s,
    angle_b,  # 0: one table of angles for all
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ALONE: tl.constexpr,  # one split
    # There are several queries, and the last one attends to all keys.
    CAUSAL: tl.constexpr,
    # Keys of a page, or None.
    PAGE: tl.constexpr,
    # Values up to this one in an additive mask hide a key; None: the mask is bool or absent.
    HIDDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    # The number of dims that are rotated; None without a new key.
    ROTATED: tl.constexpr,
    # The norms multiply by (1 + w).
    ONE_PLUS: tl.constexpr,
    # Cos and sin contain each angle once.
    ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Process some blocks of keys of one key head, for ROWS of the GROUP · S_q queries that share it."""
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    b = tl.program_id(2).to(tl.int64)
    pieces = tl.cdiv(GROUP * queries, ROWS)
    kv_head = tl.program_id(1) // pieces
    member = (tl.program_id(1) % pieces) * ROWS + tl.arange(0, ROWS)
    real = member < GROUP * queries
    i = member % queries
    h = kv_head * GROUP + member // queries
    part = ((b * queries + i) * HEADS + h) * splits + split
    parts = tl.num_programs(2).to(tl.int64) * queries * HEADS * splits
    peaks = output + parts * VALUE_DIM
    if lengths is not None:
        length = tl.load(lengths + b * length_b).to(tl.int32)
        if starts is not None:
            start = tl.load(starts + b).to(tl.int32)
    column = tl.arange(0, BLOCK_D)
    value_column = tl.arange(0, BLOCK_V)
    inside, value_inside = column < DIM, value_column < VALUE_DIM
    # All of these loads are in flight at the same time.
    query += b * query_b + h[:, None].to(tl.int64) * query_h + i[:, None] * query_s
    if new_key is None:
        q = tl.load(query + column[None, :], mask=real[:, None] & inside[None, :], other=0.0)
    else:
        angles: tl.constexpr = ROTATED // 2 if ONCE else ROTATED
        cos += b * angle_b
        sin += b * angle_b
        angle_offset = i[:, None] * angles if CAUSAL else 0
        q = rotated_rows(
            query,
            real[:, None],
            cos + angle_offset,
            sin + angle_offset,
            query_weight,
            query_eps,
            DIM,
            ROTATED,
            ONE_PLUS,
            ONCE,
            BLOCK_D,
            not CAUSAL,
        )
    end, first = keys, 0
    if lengths is not None:
        end = tl.minimum(length, keys)
        if starts is not None:
            first = tl.maximum(start - (length - end), 0)
    position = end - queries + i
    if window is not None:
        first = tl.maximum(first, end - queries - window + 1)
    own = first + split * BLOCK
    # New keys are not read from the cache.
    cached = end if new_key is None else end - queries
    if not ALONE:
        idle = own >= cached
        if new_key is not None:
            # The last split processes the new keys.
            idle = idle & (split < splits - 1)
        if idle:
            tl.store(peaks + part, tl.full([ROWS], -float("inf"), tl.float32), mask=real)
            return
    key += kv_head.to(tl.int64) * key_h
    value += kv_head.to(tl.int64) * value_h
    if table is None:
        key += b * key_b
        value += b * value_b
    n = tl.arange(0, BLOCK)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, BLOCK_V], tl.float32)
    if new_key is not None:
        if ALONE or split == splits - 1:
            j = tl.arange(0, NEW if CAUSAL else 1)
            valid = j < queries
            row = tl.load(place + j, mask=valid, other=0).to(tl.int64)
            correct = ~valid | ((row >= 0) & (row == end - queries + j))
            writes = (valid & correct & (tl.program_id(1) % pieces == 0))[:, None]
            new_angle_offset = tl.minimum(j, queries - 1)[:, None] * angles if CAUSAL else 0
            last_keys = rotated_rows(
                new_key + b * new_key_b + kv_head.to(tl.int64) * new_key_h + j[:, None] * new_key_s,
                valid[:, None],
                cos + new_angle_offset,
                sin + new_angle_offset,
                key_weight,
                key_eps,
                DIM,
                ROTATED,
                ONE_PLUS,
                ONCE,
                BLOCK_D,
                not CAUSAL,
            )
            tl.store(key + row[:, None] * key_s + column[None, :], last_keys, mask=inside[None, :] & writes)
            at_values = new_value + b * new_value_b + kv_head.to(tl.int64) * new_value_h + j[:, None] * new_value_s
            in_row = value_inside[None, :]
            last_values = tl.load(at_values + value_column[None, :], mask=valid[:, None] & in_row, other=0.0)
            tl.store(value + row[:, None] * value_s + value_column[None, :], last_values, mask=in_row & writes)
            # padding does not count, but a wrong row must be visible
            counts = valid & ((end - queries + j >= first) | ~correct)
            if CAUSAL:
                known = counts[None, :] & (j[None, :] <= i[:, None])
                if window is not None:
                    known = known & (j[None, :] > i[:, None] - window)
                last_scores = _scaled(tl.dot(q, tl.trans(last_keys), input_precision=PRECISION), scale, softcap)
                last_exponentials, _, peak, total = _softmax(tl.where(known, last_scores, -float("inf")), peak, total)
                visible_values = tl.where(counts[:, None], last_values, 0.0)
                visible_values = tl.where(correct[:, None], visible_values, float("nan")).to(last_values.dtype)
                sums = tl.dot(last_exponentials.to(visible_values.dtype), visible_values, input_precision=PRECISION)
            else:
                # tl.dot, as for all other keys: a sum of products would keep all of its terms in registers
                same = tl.broadcast_to(tl.trans(last_keys), (BLOCK_D, NEW))
                score = _scaled(tl.max(tl.dot(q, same, input_precision=PRECISION), 1), scale, softcap)
                visible_values = tl.where(correct[:, None], last_values.to(tl.float32), float("nan"))
                peak = tl.where(counts, score, -float("inf"))
                total = tl.where(counts, total + 1.0, total)
                sums = tl.where(counts[:, None], sums + visible_values, sums)
    for block in tl.range(own, cached, splits * BLOCK):
        at = block + n
        needed = at < cached
        seen = at[None, :] <= position[:, None] if CAUSAL and new_key is None else needed[None, :]
        # For one query, `first` is exact.
        if window is not None and (new_key is None or CAUSAL):
            seen = seen & (at[None, :] > position[:, None] - window)
        if mask is not None:
            address = mask + b * mask_b + h[:, None].to(tl.int64) * mask_h + i[:, None] * mask_q + at[None, :] * mask_k
            if HIDDEN is None:
                seen = tl.load(address, mask=seen & real[:, None], other=0) != 0
            else:
                bias = tl.load(address, mask=seen & real[:, None], other=-float("inf")).to(tl.float32)
                seen = bias > HIDDEN
            # A key that no query attends to isn't read.
            needed = tl.max(seen.to(tl.int32), 0) > 0

        across = needed[None, :] if DIM == BLOCK_D else needed[None, :] & inside[:, None]
        if table is None:
            address = key + tl.cast(block, tl.int64) * key_s + n[None, :] * key_s + column[:, None]
        else:
            page = tl.load(table + b * table_b + at // PAGE, mask=needed, other=0).to(tl.int64)
            address = key + (page * key_b + at % PAGE * key_s)[None, :] + column[:, None]
        k = tl.load(address, mask=across, other=0.0)
        scores = _scaled(tl.dot(q, k, input_precision=PRECISION), scale, softcap)
        if mask is not None and HIDDEN is not None:
            scores += bias * LOG2E
        exponentials, rescale, peak, total = _softmax(tl.where(seen, scores, -float("inf")), peak, total)
        down = needed[:, None] if VALUE_DIM == BLOCK_V else needed[:, None] & value_inside[None, :]
        if table is None:
            address = value + tl.cast(block, tl.int64) * value_s + n[:, None] * value_s + value_column[None, :]
        else:
            address = value + (page * value_b + at % PAGE * value_s)[:, None] + value_column[None, :]
        v = tl.load(address, mask=down, other=0.0)
        sums = sums * rescale[:, None] + tl.dot(exponentials.to(v.dtype), v, input_precision=PRECISION)

    address = output + part[:, None] * VALUE_DIM + value_column[None, :]
    kept = real[:, None] & value_inside[None, :]
    if ALONE:
        if sinks is not None:
            sink = tl.load(sinks + h, mask=real, other=0.0).to(tl.float32) * LOG2E
            level = tl.maximum(peak, sink)
            total = total * tl.exp2(peak - level) + tl.exp2(sink - level)
            sums = sums * tl.exp2(peak - level)[:, None]
        result = sums / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(address, result.to(output.dtype.element_ty), mask=kept)
    else:
        tl.store(address, sums, mask=kept)
        tl.store(peaks + part, peak, mask=real)
        tl.store(peaks + parts + part, total, mask=real)


@triton.jit
def _softmax(scores, peak, total):
    """Add a block of scores, [ROWS, keys], to a softmax, given its largest score and its sum so far.

    Returns the exponentials, the factor of the sums so far, and the new largest score and sum.
    """
    higher = tl.maximum(peak, tl.max(scores, 1))
    # -inf means that no key has been seen so far.
    level = tl.where(higher == -float("inf"), 0.0, higher)
    exponentials = tl.exp2(scores - level[:, None])
    rescale = tl.exp2(peak - level)
    return exponentials, rescale, higher, total * rescale + tl.sum(exponentials, 1)


@triton.jit
def _scaled(scores, scale, softcap):
    """Apply the scale and the softcap, and multiply by log₂(e) for exp2."""
    if softcap is not None:
        # tanh in terms of exp2, which every backend has; exactly ±1 for large scores
        return softcap * LOG2E * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (scale / softcap * (2.0 * LOG2E)))))
    return scores * (scale * LOG2E)


CDNA = tuple(gfx for gfx in ARCHITECTURES if gfx.startswith("gfx9"))
RDNA = tuple(gfx for gfx in ARCHITECTURES if not gfx.startswith("gfx9"))


def _attend(
    dim: int,
    group: int,
    *,
    queries: int = 1,
    dtype: str = "bf16",
    value_dim: int | None = None,
    alone: bool = False,
    window: bool = False,
    softcap: bool = False,
    mask: str | None = None,
    starts: bool = True,
    page: int | None = None,
    rotated: int | None = None,
    norms: bool = False,
    one_plus: bool = False,
    once: bool = False,
    omitted: tuple[str, ...] = (),
) -> Iterator[Build]:
    """Builds for CDNA and RDNA, whose blocks differ.

    rotated: the number of rotated dims of new keys; None: no new keys. omitted: architectures that refuse these calls.
    """
    numbers = ("query_b", "query_h", "query_s", "key_b", "key_h", "key_s", "value_b", "value_h", "value_s")
    mask_strides = ("mask_b", "mask_h", "mask_q", "mask_k")
    new_tensors, weights = ("new_key", "new_value", "cos", "sin"), ("query_weight", "key_weight")
    new_strides = (*(f"new_{name}_{axis}" for name in ("key", "value") for axis in "bhs"), "angle_b")
    value_dim = value_dim or dim
    types = {name: f"*{dtype}" for name in ("query", "key", "value", "output", "sinks", *new_tensors, *weights)}
    types |= {"output": types["output"] if alone else "*fp32", "lengths": "*i64", "starts": "*i64", "scale": "fp32"}
    types |= dict.fromkeys(
        ("keys", "queries", "window", "length_b", "table_b", *numbers, *mask_strides, *new_strides), "i32"
    )
    types |= {"softcap": "fp32", "mask": f"*{mask}", "table": "*i32", "place": "*i64"}
    types |= dict.fromkeys(("query_eps", "key_eps"), "fp32")
    absent = {
        "queries": queries == 1,
        "window": not window,
        "softcap": not softcap,
        "starts": not starts,
        "sinks": not alone,
        **dict.fromkeys(("table", "table_b"), page is None),
        **dict.fromkeys(("mask", *mask_strides), mask is None),
        **dict.fromkeys((*new_tensors, "place", *new_strides, "query_eps", "key_eps"), rotated is None),
        **dict.fromkeys(weights, not norms),
    }
    fixed: dict[str, Any] = {name: 1 if name == "queries" else None for name, is_absent in absent.items() if is_absent}
    for architectures in (CDNA, RDNA):
        size = 4 if dtype == "fp32" else 2
        plain = mask is None and not window
        division = plan(1, 8, group * queries, 65536, max(dim, value_dim), size, 304, architectures[0], plain=plain)
        yield Build(
            decode_kernel,
            {name: kind for name, kind in types.items() if name not in fixed},
            {
                **fixed,
                "HEADS": 8 * group,
                "GROUP": group,
                "DIM": dim,
                "VALUE_DIM": value_dim,
                "ALONE": alone,
                "CAUSAL": queries > 1,
                "PAGE": page,
                "HIDDEN": None if mask in (None, "i1") else -1e38,
                "PRECISION": "ieee" if dtype == "fp32" else None,
                "ROTATED": rotated,
                "ONE_PLUS": one_plus,
                "ONCE": once,
                "ROWS": division.rows,
                "BLOCK": division.keys,
                "BLOCK_D": triton.next_power_of_2(dim),
                "BLOCK_V": triton.next_power_of_2(value_dim),
            },
            num_warps=division.warps,
            num_stages=division.stages,
            divisible=(*numbers, *new_strides),
            options={} if rotated is None else {"enable_fp_fusion": False},
            # RDNA multiplies fp32 without matrix instructions.
            matrix=dtype != "fp32" or architectures[0] == "gfx90a",
            architectures=tuple(architecture for architecture in architectures if architecture not in omitted),
        )


BUILDS = (
    *_attend(128, 4),  # Llama, Mistral, Qwen
    *_attend(128, 4, queries=5),
    *_attend(128, 4, mask="i1"),
    *_attend(128, 4, mask="bf16", queries=5, starts=False),
    *_attend(128, 4, alone=True),
    *_attend(64, 8, dtype="fp16", window=True),  # gpt-oss
    *_attend(256, 2, softcap=True, window=True, queries=5, omitted=GFX11),  # Gemma
    *_attend(96, 1),  # Phi
    *_attend(192, 1, value_dim=128, omitted=GFX11),  # DeepSeek
    *_attend(128, 4, dtype="fp32"),
    *_attend(128, 4, page=256, starts=False),
    *_attend(64, 8, page=256, starts=False, alone=True),
    # Steps with the rotation and the cache.
    *_attend(128, 4, rotated=128),
    *_attend(128, 4, queries=6, rotated=128, norms=True),
    *_attend(256, 2, queries=6, rotated=256, window=True, norms=True, one_plus=True, omitted=GFX11),
    *_attend(128, 4, rotated=128, starts=False, norms=True),  # Qwen3
    *_attend(128, 4, rotated=128, alone=True, starts=False, norms=True),
    *_attend(256, 2, rotated=256, window=True, norms=True, one_plus=True, omitted=GFX11),  # Gemma 3
    *_attend(64, 8, rotated=64, window=True, once=True, dtype="fp16"),  # gpt-oss
    *_attend(80, 1, rotated=32),  # Phi
)
