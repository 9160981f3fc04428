"""Look up the numbers of 4-bit codes in a table of 16 numbers in registers.

AMD and NVIDIA GPUs have an instruction that selects four of eight bytes, and thus looks up one byte of four numbers in
one half of the table. A second such instruction looks them up in the other half, and a third one selects between the
two results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build

# The instructions that select bytes.
AMD, NVIDIA = "v_perm_b32", "prmt"
_NVIDIA = tl.constexpr(NVIDIA)
_AMD = tl.constexpr(AMD)


@triton.jit
def load_table(table, BYTE: tl.constexpr):
    """One byte of the numbers of codes 0 … 7, and of 8 … 15: two tensors, int64 [1]. table: `ops.four_bit.table_bytes`.

    They are tensors, because with scalars the compiler would move the numbers through shared memory before `tl.dot`.
    Without a table: two zeros.
    """
    if table is None:
        return 0, 0
    else:
        at = table + 2 * BYTE + tl.arange(0, 1)
        return tl.load(at), tl.load(at + 1)


@triton.jit
def coded(
    words,
    half,
    # The first bytes of the numbers of codes 0 … 7 and of codes 8 … 15.
    low,
    low_end,
    # Their second bytes.
    high,
    high_end,
    SIGNED: tl.constexpr,
    SELECT: tl.constexpr,
):
    """Two bytes of the numbers of four runs, as int16: those with the indices `run_of(half, 0)` … `run_of(half, 3)`.

    half: 0 or 1. SIGNED: whether codes 8 … 15 share the first bytes of 0 … 7, because their numbers are the negatives.
    SELECT: the instruction that selects bytes; None: several portable instructions.
    """
    if SELECT == _NVIDIA:
        return _coded_pairs(words, half, low, low_end, high, high_end, SIGNED)
    else:
        codes = words >> (4 * half)
        places = codes & 0x07070707
        ends = ((codes >> 1) & 0x04040404) | 0x03020100
        lows = _lookup(low, places, SELECT)
        if not SIGNED:
            lows = _select(lows, _lookup(low_end, places, SELECT), ends, SELECT)
        highs = _select(_lookup(high, places, SELECT), _lookup(high_end, places, SELECT), ends, SELECT)
        first = _select(lows, highs, 0x05010400, SELECT)
        second = _select(lows, highs, 0x07030602, SELECT)
        return first.to(tl.int16), (first >> 16).to(tl.int16), second.to(tl.int16), (second >> 16).to(tl.int16)


@triton.jit
def coded_run(
    words,
    low,
    low_end,
    high,
    high_end,
    RUN: tl.constexpr,
    SIGNED: tl.constexpr,
    SELECT: tl.constexpr,
):
    """`coded` for one run. Calls for runs of the same half share their instructions."""
    half: tl.constexpr = RUN // 4 if SELECT == _NVIDIA else RUN % 2
    a, b, c, d = coded(words, half, low, low_end, high, high_end, SIGNED, SELECT)
    return result_at(a, b, c, d, RUN % 4 if SELECT == _NVIDIA else RUN // 2)


@triton.jit
def result_at(a, b, c, d, PLACE: tl.constexpr):
    """One of the results of `coded`. Triton 3.2 can't keep them in a tuple."""
    if PLACE < 2:
        return b if PLACE else a
    else:
        return d if PLACE == 3 else c


@triton.jit
def run_of(half, PLACE: tl.constexpr, SELECT: tl.constexpr):
    """The index of a run in `coded`: a half contains four adjacent runs on NVIDIA GPUs, elsewhere every second run."""
    if SELECT == _NVIDIA:
        return 4 * half + PLACE
    else:
        return half + 2 * PLACE


@triton.jit
def _coded_pairs(words, half, low, low_end, high, high_end, SIGNED: tl.constexpr):
    """`coded` for two words at a time, so that both numbers of a run end up in one register.

    NVIDIA's instruction reads the indices of four bytes from 4 bits each. They come from two runs of both words.
    """
    if SIGNED:
        return tl.inline_asm_elementwise(
            _PAIRS_SIGNED,
            "=r,=r,=r,=r,r,r,r,r,l,l,l,l,l,l",
            [words, 16 * half, low, high, high_end],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            _PAIRS,
            "=r,=r,=r,=r,r,r,r,r,l,l,l,l,l,l,l,l",
            [words, 16 * half, low, high, high_end, low_end],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def _lookup(table, places, SELECT: tl.constexpr):
    """Four of the eight bytes of an int64. places: as in `_select`."""
    return _select(table.to(tl.int32), (table >> 32).to(tl.int32), places, SELECT)


@triton.jit
def _select(first, second, places, SELECT: tl.constexpr):
    """Four of the eight bytes of first and second. places: their indices, 0 … 7, one per byte."""
    if SELECT == _AMD:
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


def _pairs(signed: bool) -> str:
    """The PTX of `_coded_pairs`.

    $0 … $3: the results, each with the numbers of both words. $4, $5: the words. $6: 16 · half. $8, $10 and $12: low,
    high and high_end. $14: low_end, unless signed. The other operands are copies for the second word.
    """
    lines = [
        ".reg .b32 other, runs<2>, places<2>, ends<2>, lows, highs, end, table<8>;",
        "mov.b64 {table0, table1}, $8;",
        "mov.b64 {table2, table3}, $10;",
        "mov.b64 {table4, table5}, $12;",
        *([] if signed else ["mov.b64 {table6, table7}, $14;"]),
        # runs 0, 2, 4 and 6 of both words, then runs 1, 3, 5 and 7
        "shl.b32 other, $5, 4;",
        "lop3.b32 runs0, $4, other, 0x0F0F0F0F, 0xE4;",
        "shr.u32 other, $4, 4;",
        "lop3.b32 runs1, other, $5, 0x0F0F0F0F, 0xE4;",
    ]
    for run in (0, 1):
        lines += [
            f"and.b32 places{run}, runs{run}, 0x77777777;",
            f"shr.u32 ends{run}, runs{run}, 1;",
            f"and.b32 ends{run}, ends{run}, 0x44444444;",
            f"or.b32 ends{run}, ends{run}, 0x32103210;",
            f"shr.u32 places{run}, places{run}, $6;",
            f"shr.u32 ends{run}, ends{run}, $6;",
            f"prmt.b32 lows, table0, table1, places{run};",
        ]
        if not signed:
            lines += [f"prmt.b32 end, table6, table7, places{run};", f"prmt.b32 lows, lows, end, ends{run};"]
        lines += [
            f"prmt.b32 highs, table2, table3, places{run};",
            f"prmt.b32 end, table4, table5, places{run};",
            f"prmt.b32 highs, highs, end, ends{run};",
            f"prmt.b32 ${run}, lows, highs, 0x5140;",
            f"prmt.b32 ${run + 2}, lows, highs, 0x7362;",
        ]
    return "\n".join(("{", *lines, "}"))


_PAIRS, _PAIRS_SIGNED = tl.constexpr(_pairs(False)), tl.constexpr(_pairs(True))


# Other kernels call the functions of this module.
BUILDS: tuple[Build, ...] = ()
