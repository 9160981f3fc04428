"""Numbers of 4-bit codes, from a table of 16 that lies in registers.

Both AMD and NVIDIA GPUs have an instruction that selects four bytes among eight, so that it looks up one byte of four
numbers in a half of the table. A second lookup in the other half and a selection between the two results complete it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build

AMD, NVIDIA = "v_perm_b32", "prmt"  # the instructions
_NVIDIA = tl.constexpr(NVIDIA)
_AMD = tl.constexpr(AMD)


@triton.jit
def load_table(table, BYTE: tl.constexpr):
    """One byte of the numbers of codes 0 … 7, and of 8 … 15: two int64. table: see `ops.four_bit.table_bytes`."""
    if table is None:
        return 0, 0
    else:
        return tl.load(table + 2 * BYTE), tl.load(table + 2 * BYTE + 1)


@triton.jit
def coded(
    words,
    half,
    low,  # the first byte of the numbers of codes 0 … 7
    low_end,  # and of 8 … 15
    high,  # the second byte of the numbers of codes 0 … 7
    high_end,  # and of 8 … 15
    PLACE: tl.constexpr,
    SIGNED: tl.constexpr,  # codes 8 … 15 have the first bytes of 0 … 7, because they are their negatives
    SELECT: tl.constexpr,  # the instruction that selects bytes, or None: several portable instructions
):
    """Two bytes of the numbers of the run `run_of(half, PLACE)` of the words, as int16.

    half: 0 or 1. PLACE: 0 … 3. Calls that differ only in PLACE share most of their instructions.
    """
    # NVIDIA's instruction reads the places of the four bytes from 4 bits each, and AMD's from a byte each
    if SELECT == _NVIDIA:
        codes = words >> (16 * half)
        places = codes & 0x7777
        ends = ((codes >> 1) & 0x4444) | 0x3210
    else:
        codes = words >> (4 * half)
        places = codes & 0x07070707
        ends = ((codes >> 1) & 0x04040404) | 0x03020100
    lows = _lookup(low, places, SELECT)
    if not SIGNED:
        lows = _select(lows, _lookup(low_end, places, SELECT), ends, SELECT)
    highs = _select(_lookup(high, places, SELECT), _lookup(high_end, places, SELECT), ends, SELECT)
    if PLACE < 2:
        pairs = _select(lows, highs, 0x5140 if SELECT == _NVIDIA else 0x05010400, SELECT)
    else:
        pairs = _select(lows, highs, 0x7362 if SELECT == _NVIDIA else 0x07030602, SELECT)
    return (pairs >> (16 * (PLACE % 2))).to(tl.int16)


@triton.jit
def of_run(
    words,
    low,
    low_end,
    high,
    high_end,
    RUN: tl.constexpr,
    SIGNED: tl.constexpr,
    SELECT: tl.constexpr,
):
    """`coded` for the index of a run."""
    if SELECT == _NVIDIA:
        return coded(words, RUN // 4, low, low_end, high, high_end, RUN % 4, SIGNED, SELECT)
    else:
        return coded(words, RUN % 2, low, low_end, high, high_end, RUN // 2, SIGNED, SELECT)


@triton.jit
def run_of(half, PLACE: tl.constexpr, SELECT: tl.constexpr):
    """The index of a run: a word contains those of a half in adjacent 4-bit numbers, or in those of one parity."""
    if SELECT == _NVIDIA:
        return 4 * half + PLACE
    else:
        return half + 2 * PLACE


@triton.jit
def _lookup(table, places, SELECT: tl.constexpr):
    """Four of the eight bytes of an int64."""
    return _select(table.to(tl.int32), (table >> 32).to(tl.int32), places, SELECT)


@triton.jit
def _select(first, second, places, SELECT: tl.constexpr):
    """Four of the eight bytes of first and second, whose places are 0 … 7."""
    if SELECT == _NVIDIA:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [first, second, places], dtype=tl.int32, is_pure=True, pack=1
        )
    elif SELECT == _AMD:
        return tl.inline_asm_elementwise(
            "v_perm_b32 $0, $1, $2, $3", "=v,v,v,v", [second, first, places], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        result = 0
        for byte in tl.static_range(4):
            place = (places >> (8 * byte)) & 7
            source = tl.where(place < 4, first, second)
            result |= ((source >> ((place & 3) * 8)) & 0xFF) << (8 * byte)
        return result


BUILDS: tuple[Build, ...] = ()  # its functions are parts of other kernels
