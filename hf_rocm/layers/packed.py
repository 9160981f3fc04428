"""Attention of vision towers over packed images of different sizes."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_rocm import ops


def packed(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, *, scale: float) -> Tensor:
    """Bidirectional attention within every sequence of a packed batch.

    query, key, value: [T, H, D]. ends: [sequences + 1] cumulative lengths, integers. Only the longest length is read
    on the host; the stock layers read every length. Returns [T, H, D].
    """
    longest = int((ends[1:] - ends[:-1]).max())
    ends = ends.to(torch.int32)
    return ops.varlen_attention(
        query, key, value, ends, ends, longest_query=longest, longest_key=longest, scale=scale, causal=False
    )
