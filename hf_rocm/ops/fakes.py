"""Functions that return empty outputs, from which torch.compile gets the shapes of an operator's outputs.

They are passed as the argument `fake` of `custom_op.opaque`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def like(x: Tensor, *_: object) -> Tensor:
    """An empty contiguous tensor with the shape of x."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def two_like(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Two empty contiguous tensors with the shape of x."""
    return like(x), like(x)


def half(x: Tensor, *_: object) -> Tensor:
    """An empty tensor [..., d] for x [..., 2d]."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def attended(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    """An empty tensor [B, S_q, H, D_v] for queries [B, H, S_q, D] and values [B, Hkv, S_k, D_v]."""
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))
