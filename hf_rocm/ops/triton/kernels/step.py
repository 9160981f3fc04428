"""The start and the end of a decode step.

At the start: positions, lengths, masks, rows of the cache, and token ids. At the end: the largest logits, a copy and a
digest of all logits, a check for values that are not finite, and the probability of a token. Another kernel appends
the chosen tokens after the logits have been processed.

A logit and its column are packed into one integer. These integers are ordered by logit and, among equal logits, by
descending column. So a maximum, computed in two stages, selects the first of the largest logits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build
from hf_rocm.ops.triton.kernels.packed import LEAST, index_of, pack


@triton.jit(do_not_specialize=["position", "row", "row_2", "first", "drafts", "length", "more"])
def begin_kernel(
    clock,  # [C, N] int64
    relative,  # [C, N] int64
    mask,  # [B, 1, N, L], uint8 for bool; or None
    mask_2,  # [B, 1, N, L_2] or None
    starts,  # [B] int64 or None
    starts_2,
    places,  # [PLACES] int64 or None
    places_2,
    input_ids,  # [B, N] int64 or None
    ids,  # [B, S] int64 or None
    extra_ids,  # [B, M] int64 or None
    header,  # [2] int64 or None
    position,
    row,
    row_2,
    first,
    drafts,
    length,  # S
    more,  # M
    window,  # or None
    window_2,
    size,  # L
    size_2,  # L_2
    tokens,  # N
    CLOCKS: tl.constexpr,  # C · N
    SLOTS: tl.constexpr,
    PLACES: tl.constexpr,
    PLACE_SLOTS: tl.constexpr,
    # The value of hidden keys in an additive mask; None: the masks are bool.
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write BLOCK columns of one token's masks; the first programs also write its id, the clock and the places."""
    block = tl.program_id(0)
    b = (tl.program_id(1) // tokens).to(tl.int64)
    i = tl.program_id(1) % tokens
    later = tl.zeros([], tl.int64)
    match = later
    if header is not None:
        later = tl.load(header)
        match = tl.load(header + 1)
    if mask is not None:
        seen = tl.load(relative + tokens + i) + position + later
        _write_mask(mask, b * tokens + i, seen, starts, b, window, size, block, HIDDEN, BLOCK)
    if mask_2 is not None:
        seen = tl.load(relative + 2 * tokens + i) + position + later
        _write_mask(mask_2, b * tokens + i, seen, starts_2, b, window_2, size_2, block, HIDDEN, BLOCK)
    if block == 0:
        if input_ids is not None:
            at = tl.where(i == 0, first + later, drafts + match + i - 1)
            token = tl.load(ids + b * length + at, mask=at < length, other=0)
            if extra_ids is not None:
                rest = (at >= length) & (at < length + more)
                token += tl.load(extra_ids + b * more + at - length, mask=rest, other=0)
            tl.store(input_ids + b * tokens + i, token)
        if tl.program_id(1) == 0:
            slot = tl.arange(0, SLOTS)
            value = tl.load(relative + slot, mask=slot < CLOCKS, other=0)
            tl.store(clock + slot, value + position + later, mask=slot < CLOCKS)
            slot = tl.arange(0, PLACE_SLOTS)
            if places is not None:
                tl.store(places + slot, row + later + slot, mask=slot < PLACES)
            if places_2 is not None:
                tl.store(places_2 + slot, row_2 + later + slot, mask=slot < PLACES)


@triton.jit
def _write_mask(mask, line, length, starts, b, window, size, block, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """Write BLOCK columns of one row of a mask. A buffer that is shorter than the sequence contains the last keys."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    dropped = tl.maximum(length - size, 0)
    end = length - dropped
    seen = column < end
    if window is not None:
        seen = seen & (column >= end - window)
    if starts is not None:
        seen = seen & (column >= tl.load(starts + b) - dropped)
    if HIDDEN is None:
        value = seen.to(mask.dtype.element_ty)
    else:
        value = tl.where(seen, 0.0, HIDDEN).to(mask.dtype.element_ty)
    tl.store(mask + line * size + column, value, mask=column < size)


@triton.jit
def logits_kernel(
    logits,  # [R, V]
    # The same bits as W integers.
    words,
    out,  # [R, V]
    largest,  # [R, PARTS] int64, packed
    sums,  # [R, PARTS] int64
    wrong,  # [R, PARTS] int32, the number of logits that are not finite
    exponentials,  # [2, R, PARTS] fp32: an upper bound c of the logits, and the sum of exp(logit - c); or None
    dim,  # V
    count,  # W
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Process one of the PARTS pieces of a row, and an equal share of the words."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    logits += row * dim
    out += row * dim
    size = tl.cdiv(dim, PARTS)
    best = tl.full([BLOCK], LEAST, tl.int64)
    bad = tl.zeros([BLOCK], tl.int32)
    # The smallest finite number: the difference of two infinities is NaN.
    limit = tl.full([BLOCK], -3.4028234663852886e38, tl.float32)
    exponential = tl.zeros([BLOCK], tl.float32)
    for at in tl.range(0, size, BLOCK):
        column = part * size + at + lane
        valid = (at + lane < size) & (column < dim)
        value = tl.load(logits + column, mask=valid, other=0.0)
        tl.store(out + column, value, mask=valid)
        wide = value.to(tl.float32)
        bad += (tl.abs(wide) < float("inf")).to(tl.int32) ^ 1
        # For torch.argmax, -0 equals 0.
        wide = tl.where(wide == 0.0, 0.0, wide)
        best = tl.maximum(best, tl.where(valid, pack(wide, column, 2147483648), LEAST))
        if exponentials is not None:
            before = limit
            limit = tl.maximum(limit, tl.where(valid, wide, before))
            exponential = exponential * tl.exp(before - limit) + tl.where(valid, tl.exp(wide - limit), 0.0)
    index = row * PARTS + part
    share = tl.cdiv(count, PARTS * tl.num_programs(1))
    total = tl.zeros([BLOCK], tl.int64)
    for at in tl.range(0, share, BLOCK):
        place = index * share + at + lane
        valid = (at + lane < share) & (place < count)
        total += tl.load(words + place, mask=valid, other=0).to(tl.int64)
    tl.store(largest + index, tl.max(best, 0))
    tl.store(sums + index, tl.sum(total, 0))
    tl.store(wrong + index, tl.sum(bad, 0))
    if exponentials is not None:
        highest = tl.max(limit, 0)
        tl.store(exponentials + index, highest)
        totals = exponentials + PARTS * tl.num_programs(1)
        tl.store(totals + index, tl.sum(exponential * tl.exp(limit - highest), 0))


@triton.jit
def finish_kernel(
    # This argument and the next three are as in `logits_kernel`.
    largest,
    sums,
    wrong,
    exponentials,
    further,  # [1] int64, added to the digest, or None
    tokens,  # [R] int64
    digests,  # [KEPT] int64
    doubt,  # [] fp32
    probability,  # [1] fp32, the probability of the last token; or None
    count,  # R
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Process all rows in one program with one wave, so that all digests are read before any of them is written."""
    row = tl.arange(0, ROWS)
    at = row[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
    valid = (row < count)[:, None]
    column = index_of(tl.max(tl.load(largest + at, mask=valid, other=LEAST), 1), 2147483648).to(tl.int64)
    tl.store(tokens + row, column, mask=row < count)
    digest = tl.sum(tl.sum(tl.load(sums + at, mask=valid, other=0), 1) + tl.where(row < count, column, 0), 0)
    if further is not None:
        digest += tl.load(further)
    bad = tl.sum(tl.sum(tl.load(wrong + at, mask=valid, other=0), 1), 0)
    tl.store(doubt, tl.load(doubt) + bad.to(tl.float32))
    if exponentials is not None:
        last = (count - 1) * PARTS + tl.arange(0, PARTS)
        limit = tl.load(exponentials + last)
        total = tl.sum(tl.load(exponentials + count * PARTS + last) * tl.exp(limit - tl.max(limit, 0)), 0)
        # The exponential of the largest logit is 1, unless all logits are -inf.
        tl.store(probability, tl.where(total == 0.0, float("nan"), 1.0 / total))
    slot = tl.arange(0, SLOTS)
    earlier = tl.load(digests + slot + 1, mask=slot < KEPT - 1, other=0)
    tl.store(digests + slot, tl.where(slot == KEPT - 1, digest, earlier), mask=slot < KEPT)


# The length grows with every token.
@triton.jit(do_not_specialize=["length"])
def append_kernel(
    ids,  # [B, S] int64
    tokens,  # [B] int64
    unfinished,  # [B] int64, 1 or 0
    ends,  # [ENDS] int64, or None
    pad,  # [] int64, or None
    step_ids,  # [B, 1] int64, or None
    out,  # [B, S + 1] int64
    unfinished_after,  # [B] int64, the rows that are unfinished afterwards
    done,  # [] uint8
    length,  # S
    rows,  # B
    ENDS: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write BLOCK columns of one row; the first program also determines the unfinished rows."""
    own_row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(ids + own_row * length + column, mask=column < length, other=0)
    value = tl.where(column == length, _next(tokens + own_row, unfinished + own_row, pad, None), value)
    tl.store(out + own_row * (length + 1) + column, value, mask=column <= length)
    if step_ids is not None:
        tl.store(step_ids + own_row + tl.zeros([BLOCK], tl.int64), value, mask=column == length)
    if tl.program_id(0) + tl.program_id(1) == 0:
        row = tl.arange(0, ROWS)
        valid = row < rows
        remaining = tl.load(unfinished + row, mask=valid, other=0)
        if ENDS:
            slot = tl.arange(0, SLOTS)
            end = tl.load(ends + slot, mask=slot < ENDS, other=0)
            token = _next(tokens + row, unfinished + row, pad, valid)
            equal = (token[:, None] == end[None, :]) & (slot < ENDS)[None, :]
            remaining = tl.where(tl.max(equal.to(tl.int32), 1) > 0, 0, remaining)
        tl.store(unfinished_after + row, remaining, mask=valid)
        tl.store(done, tl.where(tl.max(remaining, 0) == 0, 1, 0).to(tl.uint8))


@triton.jit
def _next(tokens, unfinished, pad, valid):
    """The tokens of rows. A row that has ended gets the padding token, if there is one."""
    token = tl.load(tokens, mask=valid)
    if pad is not None:
        token = tl.where(tl.load(unfinished, mask=valid) != 0, token, tl.load(pad))
    return token


def _begin_build(
    mask: str,
    *,
    masks: int = 1,
    tokens: int = 1,
    starts: bool = False,
    window: bool = False,
    sources: int = 0,
    header: bool = False,
) -> Build:
    """masks: the number of masks and of tensors with rows. The second mask, or the only one, has the window."""
    given = ["clock", "relative", "mask", "mask_2"][: 2 + masks] + ["places", "places_2"][:masks]
    given += ["starts", "starts_2"][:masks] if starts else []
    given += ["input_ids", "ids", "extra_ids"][: 1 + sources] if sources else []
    given += ["header"] if header else []
    windows = ["window_2" if masks == 2 else "window"] if window else []
    pointers = {name: f"*{mask}" if name.startswith("mask") else "*i64" for name in given}
    optional = ["mask", "mask_2", "starts", "starts_2", "places", "places_2", "input_ids", "ids", "extra_ids", "header"]
    numbers = ["position", "row", "row_2", "first", "drafts", "length", "more", "size", "size_2"]
    fixed: dict[str, object] = {
        name: None for name in (*optional, "window", "window_2") if name not in (*given, *windows)
    }
    clocks = (2 + masks) * tokens
    return Build(
        begin_kernel,
        {**pointers, **dict.fromkeys([*numbers, *windows, *([] if tokens == 1 else ["tokens"])], "i32")},
        {
            **fixed,
            **({"tokens": 1} if tokens == 1 else {}),
            "CLOCKS": clocks,
            "SLOTS": triton.next_power_of_2(clocks),
            "PLACES": 21,
            "PLACE_SLOTS": 32,
            "HIDDEN": None if mask == "u8" else -3.3895313892515355e38 if mask == "bf16" else -65504.0,
            "BLOCK": 1024,
        },
        threads=256,
        divisible=("size", "size_2"),
    )


def _logits_build(parts: int, *, dtype: str = "bf16", words: str = "i64", probable: bool = False) -> Build:
    tensors = {"logits": dtype, "words": words, "out": dtype, "largest": "i64", "sums": "i64", "wrong": "i32"}
    tensors |= {"exponentials": "fp32"} if probable else {}
    return Build(
        logits_kernel,
        {**{name: f"*{kind}" for name, kind in tensors.items()}, "dim": "i32", "count": "i32"},
        {**({} if probable else {"exponentials": None}), "PARTS": parts, "BLOCK": 1024},
        threads=256,
        divisible=("dim", "count"),
    )


def _finish_build(parts: int, rows: int, *, further: bool = False, probable: bool = False) -> Build:
    absent = (*(() if further else ("further",)), *(() if probable else ("exponentials", "probability")))
    types = {**dict.fromkeys(("largest", "sums", "further", "tokens", "digests"), "*i64"), "wrong": "*i32"}
    types |= {**dict.fromkeys(("exponentials", "doubt", "probability"), "*fp32"), "count": "i32"}
    return Build(
        finish_kernel,
        {name: kind for name, kind in types.items() if name not in absent},
        {**dict.fromkeys(absent), "PARTS": parts, "ROWS": rows, "KEPT": 5, "SLOTS": 8},
        num_warps=1,
    )


def _append_build(rows: int, ends: int, *, padded: bool = True, copied: bool = True) -> Build:
    present = {"ends": ends, "pad": padded, "step_ids": copied}
    absent = {name: None for name, needed in present.items() if not needed}
    names = ("ids", "tokens", "unfinished", *present, "out", "unfinished_after")
    return Build(
        append_kernel,
        {
            **{name: "*i64" for name in names if name not in absent},
            "done": "*u8",
            "length": "i32",
            "rows": "i32",
        },
        {**absent, "ENDS": ends, "ROWS": rows, "SLOTS": max(1, triton.next_power_of_2(ends)), "BLOCK": 1024},
        threads=256,
    )


BUILDS = (
    _begin_build("u8"),
    _begin_build("u8", tokens=6, sources=2, starts=True),
    _begin_build("u8", tokens=6, sources=2, header=True),
    _begin_build("bf16", masks=2, window=True),
    _begin_build("fp16", masks=2, tokens=6, window=True, starts=True, sources=1),
    _logits_build(128),
    _logits_build(16, dtype="fp16"),
    _logits_build(64, dtype="fp32"),
    _logits_build(128, words="i16"),
    _logits_build(128, probable=True),
    _finish_build(128, 1),
    _finish_build(16, 32, further=True),
    _finish_build(128, 2, probable=True),
    _append_build(1, 0, padded=False),
    _append_build(1, 3, copied=False),
    _append_build(32, 1),
)
