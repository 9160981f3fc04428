"""Attention of vision towers over images of different sizes laid end to end."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_rocm import ops


def packed(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, *, scale: float) -> Tensor:
    """Each piece attends to itself, in both directions.

    query, key, value: [T, H, D]; ends: [pieces + 1] integers, where piece i lies between entries i and i + 1. The
    longest piece is read on the host, as the stock layers read every length. Returns [T, H, D].
    """
    longest = int((ends[1:] - ends[:-1]).max())
    ends = ends.to(torch.int32)
    return ops.varlen_attention(
        query, key, value, ends, ends, longest_query=longest, longest_key=longest, scale=scale, causal=False
    )
