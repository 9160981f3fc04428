"""Find the drafts of prompt lookup on the device: count the accepted drafts, and search the earlier tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build


@triton.jit(do_not_specialize=["length"])
def look_up_kernel(
    ids,  # [S] int64
    step_ids,  # [N] int64
    selected,  # [N] int64
    header,  # [2] int64
    length,  # S
    tokens,  # N
    NGRAM: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the accepted drafts, and find the first earlier match of the longest n-gram at the end of the sequence.

    The length of a match and the position of its last token are packed into one integer. A maximum selects the longest
    match and, among equal ones, the first.
    """
    slot = tl.arange(0, SLOTS)
    draft = tl.load(step_ids + slot + 1, mask=slot < tokens - 1, other=0)
    chosen = tl.load(selected + slot, mask=slot < tokens - 1, other=0)
    accepted = tl.min(tl.where((slot >= tokens - 1) | (draft != chosen), slot, tokens), 0)
    accepted = tl.minimum(accepted, tokens - 1)
    # The position of the last token.
    last = length + accepted
    best = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        same = at < last
        count = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(NGRAM):
            token = _token(ids, selected, at - back, same & (at >= back), length)
            suffix_token = _token(ids, selected, last - back, last >= back, length)
            same = same & (at >= back) & (token == suffix_token)
            count += same.to(tl.int64)
        best = tl.maximum(best, tl.where(count > 0, (count << 40) + (1 << 40) - 1 - at, 0))
    longest = tl.max(best, 0)
    end = (1 << 40) - (longest & ((1 << 40) - 1))
    tl.store(header, last.to(tl.int64))
    tl.store(header + 1, tl.where(longest > 0, end, last + 1))


@triton.jit
def _token(ids, selected, at, valid, length):
    """The tokens at these positions of a sequence that consists of `length` ids and then the selected tokens."""
    first = tl.load(ids + at, mask=valid & (at < length), other=0)
    return first + tl.load(selected + at - length, mask=valid & (at >= length), other=0)


def _build(tokens: int, ngram: int) -> Build:
    names = ("ids", "step_ids", "selected", "header")
    return Build(
        look_up_kernel,
        {**dict.fromkeys(names, "*i64"), "length": "i32", **({"tokens": "i32"} if tokens > 1 else {})},
        {
            **({} if tokens > 1 else {"tokens": 1}),
            "NGRAM": ngram,
            "SLOTS": triton.next_power_of_2(tokens),
            "BLOCK": 1024,
        },
        threads=256,
    )


BUILDS = (_build(1, 2), _build(11, 2), _build(6, 3))
