"""Tensors as aiter's kernels read them: they take strides on trust, and load 16 bytes at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def rows_first(x: Tensor) -> Tensor:
    """[B, H, S, D] as [B, S, H, D] with a dense, aligned last dim; copies only what isn't so already."""
    x = x.transpose(1, 2)
    batch, length, head, last = x.stride()
    if last != 1 or (batch | length | head) % 8 or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def aligned(x: Tensor) -> Tensor:
    """[T, H, D] with a dense last dim and rows that start at 16 bytes."""
    total, head, last = x.stride()
    if last != 1 or (total | head) % 8 or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def rows(x: Tensor) -> Tensor:
    """[..., D] as a contiguous, aligned [M, D]."""
    x = x.reshape(-1, x.shape[-1])
    if not x.is_contiguous() or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x
