"""The tiles into which the kernels divide their work, for the wrappers and for ahead-of-time builds.

This module does not import triton, so that both can import it.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from hf_rocm.ops.triton.launch import power_of_two

# The smallest number of rows of x in a program with matrix instructions.
ROWS = 16
# With up to this many columns, programs must be small so that there are enough of them.
NARROW = 4096
MOST_SPLITS = 128
# A piece with at least this many blocks of keys is always split.
LONG = 64
# with these numbers of keys and up to this many pieces, blocks on NVIDIA GPUs are short; see `plan`
SHORT, FEW_PIECES = range(513, 1537), 8


class LinearTile(NamedTuple):
    """The tile of a GEMM. matrix: whether it uses matrix instructions. n, k: the block of W that a program processes
    at a time, k in each of `splits`. m: rows of x in a program with matrix instructions. parts: the number of programs
    over which K is split. ahead: whether the next block is loaded before the current one is multiplied (without
    matrix instructions only)."""

    matrix: bool
    n: int
    k: int
    splits: int
    threads: int
    stages: int
    m: int = ROWS
    parts: int = 1
    ahead: bool = False

    def constants(self) -> dict[str, int]:
        """The last arguments of the kernel."""
        shared = {"BLOCK_N": self.n, "BLOCK_K": self.k}
        if not self.matrix:
            return shared
        return {"PARTS": self.parts, "SPLITS": self.splits, "BLOCK_M": self.m, **shared}


# On these GPUs, tiles of 64 columns would leave too many compute units idle or with too few bytes in flight, so narrow
# tiles are used up to this number of columns. The numbers are computed (docs/kernels.md), not measured.
_NARROW_UP_TO = {"gfx942": 16384, "gfx950": 24576}


def linear_tile(
    rows: int, n: int, k: int, gated: bool, *, normed: bool = False, rocm: bool = False, arch: str | None = None
) -> LinearTile:
    """The tile for x [rows, k] and n columns of the result. normed: whether there is a norm before the GEMM.

    Measured in bf16, in captured graphs: on an NVIDIA H200 for one row with the matrices of seven models (1B to 30B),
    and for 2 to 16 rows with those of Llama-3.1-8B; on an H100 for 6 rows with those of Llama-3.2-1B, and for 32 rows
    with those of Llama-3.1-8B. Nothing was measured on AMD GPUs: they use similar tiles that need less LDS and fewer
    registers. `HF_ROCM_TIER=linear=torch` uses the vendor's library there.
    """
    if rows > 1:
        m = 2 * ROWS if ROWS < rows <= 2 * ROWS else ROWS
        if n > _NARROW_UP_TO.get(arch or "", NARROW) or gated:
            # on RDNA 3, the compiler would spill registers with 64 columns and 32 rows
            fewer = rocm and (gated or (m > ROWS and (arch or "").startswith("gfx11")))
            return LinearTile(True, 32 if fewer else 64, 128, 1, 128, 2 if rocm else 4 + (not gated), m)
        if rocm:
            return LinearTile(True, 16, 128, 4, 128, 2, m)
        if m > ROWS:
            return LinearTile(True, 16, 128, 2, 64, 4, m)
        # a fifth stage would be faster on an H100, but needs more shared memory than smaller GPUs have
        return LinearTile(True, 16, 128, 4, 128, 4 if n <= 2048 else 3, m)
    if not rocm:
        return _row_tile(n, k, gated, normed)
    if arch in ("gfx942", "gfx950") and n <= NARROW and not gated:
        # This tile has twice the bytes in flight; computed, not measured.
        return LinearTile(False, 2, 1024, 1, 128, 2)
    if gated or n <= NARROW:
        return LinearTile(False, 2, 512, 1, 64, 2)
    return LinearTile(False, 4, 1024, 1, 128, 2)


def _row_tile(n: int, k: int, gated: bool, normed: bool) -> LinearTile:
    """The tile for one row on NVIDIA: the fastest measured one, or one within 4 % of it.

    normed: whether the kernel also computes a norm.
    """
    whole, wide = k % 1024 == 0, k % 2048 == 0
    if gated and k < 4096:
        # One warp waits for no other, so its sums are finished while other programs of the SM read.
        return LinearTile(False, 1, 512, 1, 32, 2)
    if gated:
        return LinearTile(False, 2, 1024, 1, 128, 2) if normed or not wide else LinearTile(False, 1, 2048, 1, 128, 2)
    if normed:
        return LinearTile(False, 2, 512, 1, 32, 2)
    if n > NARROW:
        return LinearTile(False, 4, 1024, 1, 128, 2) if k >= 4096 else LinearTile(False, 4, 512, 1, 64, 2)
    if wide and k >= 2 * NARROW and n <= NARROW // 2:
        return LinearTile(False, 1, 2048, 1, 128, 2)
    if k >= NARROW:
        return LinearTile(False, 2, 2048, 1, 128, 2, ahead=True)
    if n == NARROW and not whole:
        return LinearTile(False, 2, 512, 1, 64, 2)
    return LinearTile(False, 4, 2048 if wide else 1024, 1, 64 if n == NARROW and not wide else 128, 2)


def eight_bit_tile(rows: int, n: int, gated: bool, *, rocm: bool = False, units: int = 0) -> LinearTile:
    """The tile for an 8-bit weight. units: compute units of the GPU; 0 if unknown.

    Without ROCm, these tiles took at most 10 % longer than the fastest measured ones on one NVIDIA H200, for fp8 and
    int8 with one row and for fp8 with 8, 32 and 64 rows. Tiles for ROCm are estimated from kernels of the same form.
    """
    narrow = n <= NARROW and not gated
    m = row_block(rows, rocm=rocm)
    if rows == 1:
        if rocm:
            return LinearTile(False, 2 if gated else 4, 1024, 1, 128, 2)
        return LinearTile(False, 4, 1024, 1, 64, 2) if narrow else LinearTile(False, 2, 1024, 1, 64, 2)
    if narrow if rocm else m <= ROWS:
        tile = LinearTile(True, 16, 128, 4, 128, 2 if rocm else 3, m)
    else:
        tile = LinearTile(True, 32 if rocm and gated else 64, 128, 1, 128, 2 if rocm else 4, m)
    return tile if gated else tile._replace(parts=_parts(rows, n, tile, units))


def _parts(rows: int, n: int, tile: LinearTile | FourBitTile, units: int, *, table: bool = False) -> int:
    """How many programs split K: 4 if M > 16 and at least half of the compute units would otherwise be idle.

    With a table, for which arithmetic takes longer than reading, 4 if M > 16 and there are at most `units` programs.
    """
    programs = _programs(rows, n, tile)
    return 4 if rows > ROWS and (1 if table else 2) * programs <= units else 1


def _programs(rows: int, n: int, tile: LinearTile | FourBitTile) -> int:
    return -(-n // tile.n) * -(-rows // tile.m)


def row_block(rows: int, *, rocm: bool) -> int:
    """Rows of x in a program with matrix instructions: at most 64, or at most 32 on AMD to fit into LDS."""
    return min(32 if rocm else 64, max(ROWS, power_of_two(rows)))


class FourBitTile(NamedTuple):
    """The tile of a GEMM with a 4-bit weight. matrix, n, m: as in `LinearTile`. blocks: the number of blocks of
    eight runs that a program processes at a time. unrolled: whether the loop over the groups of a block, or over its
    halves, is unrolled. parts: as in `LinearTile`. pieces: the number of pieces of a run that are read one after
    another, without matrix instructions."""

    matrix: bool
    n: int
    blocks: int
    threads: int
    stages: int
    m: int = ROWS
    unrolled: bool = False
    parts: int = 1
    pieces: int = 1

    def constants(self) -> dict[str, int]:
        """The last arguments of the kernel."""
        if self.matrix:
            constants = {"SPLITS": self.blocks, "BLOCK_M": self.m, "BLOCK_N": self.n}
            return {"UNROLLED": self.unrolled, "PARTS": self.parts, **constants}
        return {"PIECES": self.pieces, "BLOCK_N": self.n, "BLOCKS": self.blocks}


def four_bit_tile(
    rows: int,
    n: int,
    gated: bool,
    run: int,
    *,
    table: bool = False,
    scale_bytes: int = 2,
    nested: bool = False,
    rocm: bool = False,
    arch: str | None = None,
    units: int = 0,
) -> FourBitTile:
    """The tile for a 4-bit weight in runs of this length. It was measured or estimated like the tile for 8 bits.

    table: whether the numbers are looked up in a table. scale_bytes: the size of a stored scale. nested: whether scales
    are looked up in a table too. Without matrix instructions, a thread reads four words of every row, and four values
    of x for every run, at a time; with a gate and pieces, four words in all. On an H200, a tile of 64 rows of x in runs
    of 64 fills the shared memory of an SM; of the others, two fit.
    """
    narrow = n <= NARROW and not gated
    if rows == 1:
        if table and scale_bytes == 1 and not rocm:
            # Scales take many instructions to decode, so a thread processes several pieces of a run with one scale.
            if gated:
                return FourBitTile(False, 8, max(1, 128 // run), 64, 2, pieces=4)
            return FourBitTile(False, 4 if nested else 2, max(1, 256 // run), 32, 2, pieces=2)
        threads = 64 if rocm or not gated else 32
        n = 2 if gated and (rocm or table) else 8 if narrow and table and scale_bytes == 4 and not rocm else 4
        return FourBitTile(False, n, max(1, 4 * threads // run), threads, 2)
    m = row_block(rows, rocm=rocm)
    if rocm and gated and table and (arch or "").startswith("gfx11"):
        # With 32 rows, the compiler would spill registers.
        m = ROWS
    # With an unrolled loop, or with two blocks of short runs, AMD's compiler would keep all values in registers.
    if rocm:
        tile = FourBitTile(True, 16, 4 if run < 64 else 2, 128, 2, m)
    elif gated and (m == 64 or (table and m > ROWS)):
        tile = FourBitTile(True, 128, 1, 256, 2 if run == 64 else 3, m, True)
    elif gated:
        tile = FourBitTile(True, 64, 1, 128, 3 if m == ROWS else 2, m, True)
    elif m == ROWS and run == 64 and not (narrow or table):
        tile = FourBitTile(True, 16, 2, 64, 2, m, True)
    elif m == ROWS:
        tile = FourBitTile(True, 16, 8 if table and narrow and run < 64 else 4, 128, 2, m, True)
    else:
        tile = FourBitTile(True, 64, 1, 128, 2 if narrow and m == 32 and not table else 3, m, True)
    if gated:
        return tile
    if m == 64 and not table:
        # K is split as long as all programs run at the same time.
        room = (units if run == 64 else 2 * units) // _programs(rows, n, tile)
        return tile._replace(parts=4 if room >= 4 else max(1, min(room, 2)))
    return tile._replace(parts=_parts(rows, n, tile, units, table=table))


def dequantize_tile(k: int, run: int) -> tuple[int, int]:
    """(size, threads) of a program that dequantises a row of K numbers, or a piece of it.

    size: the number of 8-bit numbers if run is 0, else the number of blocks of eight runs of 4-bit numbers. A thread
    reads at most 16 bytes.
    """
    threads = 128
    size = min(4 * threads // run, power_of_two(k // (8 * run))) if run else min(16 * threads, power_of_two(k))
    return size, threads


def reorder_tile(rows: int) -> tuple[int, int]:
    """(columns, threads) of a program that reorders the columns of a row. Measured on one NVIDIA H200."""
    return (512, 128) if rows <= 8 else (2048, 256)


def rounding_tile(k: int) -> tuple[int, int]:
    """(columns, threads) of a program that rounds a row of K numbers. A thread reads 16 bytes of bf16 at a time."""
    block = min(2048, max(512, power_of_two(k)))
    return block, block // 8


class ExpertsTile(NamedTuple):
    """The tile of a GEMM. n, k: the block of an expert's weight that a program processes at a time. In the first GEMM,
    each of the n columns of the result has a gate and an up column. experts: the number of experts that a program of
    the second GEMM reads at a time."""

    n: int
    k: int
    threads: int
    stages: int
    experts: int | None = None

    def constants(self) -> dict[str, int]:
        """The last arguments of the kernel."""
        shared = {"BLOCK_N": self.n, "BLOCK_K": self.k}
        return shared if self.experts is None else {"BLOCK_E": self.experts, **shared}


# The tiles of experts were measured on one NVIDIA H200 in bf16, in captured graphs, with the sizes of Qwen3-30B-A3B,
# OLMoE and, transposed, gpt-oss-20b. Nothing was measured on AMD GPUs; `HF_ROCM_TIER=experts=torch` uses PyTorch there.
# With up to this many tokens, programs of the second GEMM must be small so that there are enough of them.
FEW_TOKENS = 4


def gate_up_tile(transposed: bool) -> ExpertsTile:
    """The tile of the first GEMM. Lanes run along K, or along the columns if these are contiguous."""
    return ExpertsTile(32, 64, 256, 2) if transposed else ExpertsTile(2, 512, 64, 2)


def down_tile(tokens: int, top_k: int, transposed: bool, *, rocm: bool = False) -> ExpertsTile:
    """The tile of the second GEMM, for this number of tokens and of experts per token."""
    experts = gcd(top_k, 4)
    if not transposed:
        if tokens == 1 and top_k % 8 == 0 and not rocm:
            return ExpertsTile(2, 256, 128, 2, 8)
        return ExpertsTile(2, 256, 64, 2, experts)
    if rocm:
        return ExpertsTile(16, 64, 128, 2, experts) if tokens <= FEW_TOKENS else ExpertsTile(32, 32, 128, 2, experts)
    # There are few programs, so each needs many bytes in flight.
    if tokens == 1:
        return ExpertsTile(16, 64, 512, 2, experts)
    return ExpertsTile(32, 64, 128, 2, experts) if tokens <= FEW_TOKENS else ExpertsTile(64, 32, 256, 2, experts)


class Mxfp4Tile(NamedTuple):
    """The tile of a GEMM of experts in MXFP4. n: columns of the result; blocks: how many blocks of 32 numbers along
    K are read at a time; experts: as in `ExpertsTile`. A thread reads one block of every row."""

    n: int
    blocks: int
    threads: int
    stages: int
    experts: int | None = None

    def constants(self) -> dict[str, int]:
        """The last arguments of the kernel."""
        shared = {"BLOCK_N": self.n, "BLOCKS": self.blocks}
        return shared if self.experts is None else {"BLOCK_E": self.experts, **shared}


def mxfp4_gate_up_tile(blocks: int, *, rocm: bool) -> Mxfp4Tile:
    """The tile of the first GEMM, for rows of this number of blocks. It is an estimate."""
    wave = 64 if rocm else 32
    return Mxfp4Tile(2 if rocm else 4, min(wave, power_of_two(blocks)), wave, 2)


def mxfp4_down_tile(blocks: int, top_k: int, *, rocm: bool) -> Mxfp4Tile:
    """The tile of the second GEMM. A program has 64 threads (32 on NVIDIA) for each expert that it reads at a time."""
    wave, experts = 64 if rocm else 32, gcd(top_k, 4)
    return Mxfp4Tile(2, min(wave, power_of_two(blocks)), wave * experts, 2, experts)


# The columns of a program that combines partial results. Such a program is one warp, so its sums need no barrier.
GATHERED_COLUMNS = 16


class Plan(NamedTuple):
    """The division of attention into programs. rows, keys: the sizes of a block; pieces: blocks of rows; splits:
    programs per piece."""

    rows: int
    keys: int
    pieces: int
    splits: int
    warps: int
    stages: int


def plan(
    b: int,
    kv_heads: int,
    rows: int,
    keys: int,
    dim: int,
    size: int,
    units: int,
    arch: str | None,
    *,
    plain: bool = True,
) -> Plan:
    """The plan for B · Hkv heads with `rows` queries each, over a cache of `keys` keys.

    dim: the larger head dim; size: bytes of an element; units: compute units of the GPU; arch: its gfx name, or None;
    plain: whether there is neither a mask nor a window. The plan depends on nothing that changes from step to step, so
    that a recorded graph stays valid. On NVIDIA, blocks and stages are the fastest measured ones; on AMD, the compiler
    does not spill registers with them.
    """
    block_rows = 32 if rows > 16 and plain and dim <= 128 else 16
    pieces = -(-rows // block_rows)
    radeon = arch is not None and not arch.startswith("gfx9")
    block = max(16, min(64, (8192 if radeon else 16384) // (power_of_two(dim) * size)))
    # An estimate for AMD: each program has fewer bytes in flight.
    room = units if arch is None else 2 * units
    if arch is None and keys in SHORT and b * kv_heads * pieces <= FEW_PIECES:
        # Latency-bound; measured with 1152 keys.
        block, room = min(block, 32), 3 * units
    splits = _splits(b * kv_heads * pieces, -(-keys // block), room)
    return Plan(block_rows, block, pieces, splits, 8 if radeon else 4, 3 if arch is None else 2)


def _splits(pieces: int, blocks: int, room: int) -> int:
    """The number of programs per piece of `blocks` blocks.

    room: the number of programs that keep the GPU busy. Long pieces always have at least two, to shorten the tail.
    """
    least = 2 if blocks >= LONG else 1
    return max(1, min(max(room // pieces, least), blocks, MOST_SPLITS))


class FlashTile(NamedTuple):
    """The tile of attention with many queries. rows: queries times heads of a group; keys: keys in a block."""

    rows: int
    keys: int
    warps: int
    stages: int


def flash_tile(dim: int, size: int, arch: str | None) -> FlashTile:
    """The tile for this head dim (the larger one) and this number of bytes per element.

    arch: the gfx name of an AMD GPU, or None. On AMD, the compiler does not spill registers with these tiles, and their
    blocks fit into 64 KiB of LDS; nothing was measured there.
    """
    # Bytes of a row.
    wide = power_of_two(dim) * size
    if arch is None:
        return FlashTile(128, 64, 8, 3) if wide <= 256 else FlashTile(64, 32, 8, 2)
    if arch.startswith("gfx9"):
        return FlashTile(128, 32, 4, 2) if wide <= 256 else FlashTile(64, 16, 4, 2)
    if arch.startswith("gfx11"):
        return FlashTile(64, 16, 8, 1)
    return FlashTile(64, 32, 8, 2) if wide <= 256 else FlashTile(32, 16, 8, 2)
