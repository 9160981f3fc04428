"""Write new keys and values into the pages of a paged cache."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build


@triton.jit
def page_kernel(
    key,  # [B, Hkv, S_q, D]
    value,  # [B, Hkv, S_q, D_v]
    key_pages,  # [P, Hkv, PAGE, D]
    value_pages,  # [P, Hkv, PAGE, D_v]
    table,  # [B, pages of a row]
    lengths,  # [B]
    slots,  # [B], the positions of the new keys; or None: the last ones
    queries,  # S_q; 1 with slots
    key_b,
    key_h,
    key_s,
    value_b,
    value_h,
    value_s,
    key_page_b,
    key_page_h,
    key_page_s,
    value_page_b,
    value_page_h,
    value_page_s,
    table_b,
    slot_b,  # None without slots
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write one head of a new key and a new value into their page. Tokens without a position or a page are skipped."""
    b = (tl.program_id(0) // queries).to(tl.int64)
    i = tl.program_id(0) % queries
    h = tl.program_id(1).to(tl.int64)
    position = tl.load(lengths + b).to(tl.int32) - queries + i
    if position < 0:
        return
    if slots is not None:
        position = tl.load(slots + b * slot_b).to(tl.int32)
    page = tl.load(table + b * table_b + position // PAGE).to(tl.int64)
    if page < 0:
        return
    column = tl.arange(0, BLOCK_D)
    vector = tl.load(key + b * key_b + h * key_h + i * key_s + column, mask=column < DIM)
    row = key_pages + page * key_page_b + h * key_page_h + position % PAGE * key_page_s
    tl.store(row + column, vector, mask=column < DIM)
    column = tl.arange(0, BLOCK_V)
    vector = tl.load(value + b * value_b + h * value_h + i * value_s + column, mask=column < VALUE_DIM)
    row = value_pages + page * value_page_b + h * value_page_h + position % PAGE * value_page_s
    tl.store(row + column, vector, mask=column < VALUE_DIM)


def _page(dim: int, page: int, dtype: str = "bf16", *, slots: bool = False) -> Build:
    given = {"slots": "*i32", "slot_b": "i32"}
    tensors = dict.fromkeys(("key", "value", "key_pages", "value_pages"), f"*{dtype}")
    pair = [f"{name}_{axis}" for name in ("key", "value", "key_page", "value_page") for axis in "bhs"]
    return Build(
        page_kernel,
        {
            **tensors,
            "table": "*i32",
            "lengths": "*i32",
            "queries": "i32",
            "table_b": "i32",
            **dict.fromkeys(pair, "i32"),
            **(given if slots else {}),
        },
        {
            **({} if slots else dict.fromkeys(given)),
            "DIM": dim,
            "VALUE_DIM": dim,
            "PAGE": page,
            "BLOCK_D": triton.next_power_of_2(dim),
            "BLOCK_V": dim,
        },
        num_warps=1,
        divisible=tuple(pair),
    )


BUILDS = (_page(128, 256), _page(64, 256, slots=True))
