"""Layouts of tensors for aiter's kernels, which don't check strides and load 16 bytes at a time."""

from __future__ import annotations

import torch
from torch import Tensor

# The size of a tile of preshuffled weights.
ROWS, COLUMNS = 16, 32


def rows_first(x: Tensor) -> Tensor:
    """Return [B, H, S, D] as [B, S, H, D] with a dense, aligned last dim, copied only if necessary."""
    x = x.transpose(1, 2)
    batch, length, head, last = x.stride()
    if last != 1 or (batch | length | head) % 8 or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def aligned(x: Tensor) -> Tensor:
    """[T, H, D] with a dense last dim and rows that are aligned to 16 bytes; copied only if necessary."""
    total, head, last = x.stride()
    if last != 1 or (total | head) % 8 or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def shuffle_tiles(matrix: Tensor, run: int) -> Tensor:
    """Copy [N, K] into the order that the preshuffled GEMMs read; N % 16 = K % 32 = 0.

    Tiles of 16 rows by 32 columns are stored one after another. A tile is stored as runs of `run` columns (16 bytes):
    the first run of each of the 16 rows, then the second run of each row, and so on.
    """
    n, k = matrix.shape
    tiles = matrix.reshape(n // ROWS, ROWS, k // COLUMNS, COLUMNS // run, run)
    return tiles.permute(0, 2, 3, 1, 4).reshape(n, k)


def unshuffle_tiles(data: Tensor, run: int) -> Tensor:
    """The inverse of `shuffle_tiles`."""
    n, k = data.shape
    tiles = data.reshape(n // ROWS, k // COLUMNS, COLUMNS // run, ROWS, run)
    return tiles.permute(0, 3, 1, 2, 4).reshape(n, k)


def rows(x: Tensor) -> Tensor:
    """[..., D] as a contiguous, aligned [M, D]; copied only if necessary."""
    x = x.reshape(-1, x.shape[-1])
    if not x.is_contiguous() or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x
