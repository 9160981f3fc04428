"""The bits of tensors as integers, and sums over all elements, which a GPU computes with two kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# The largest number of rows that are summed in parallel.
ROWS = 128


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that NaN compares equal to itself."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()])


def words(tensor: Tensor) -> Tensor:
    """`bits` with several elements per integer if possible, so that a GPU adds fewer numbers."""
    whole = (
        tensor.is_contiguous() and tensor.nbytes % 8 == 0 and tensor.storage_offset() * tensor.element_size() % 8 == 0
    )
    return tensor.view(-1).view(torch.int64) if whole else bits(tensor)


def sum_of_bits(tensors: Sequence[Tensor]) -> Tensor:
    """A digest of these tensors, [1] int64: the sum of their `words`."""
    return sum_of_words([words(tensor) for tensor in tensors])


def sum_of_words(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of all integers of these tensors, [1] int64."""
    sums = [_sums(integers) for integers in tensors]
    return (sums[0] if len(sums) == 1 else torch.cat(sums)).sum(0, keepdim=True)


def _sums(integers: Tensor) -> Tensor:
    """Reduce integers to at most `ROWS` int64 numbers with the same sum."""
    if integers.ndim == 1 and integers.dtype == torch.int64 and len(integers) <= ROWS:
        return integers
    return rows(integers).sum(-1, dtype=torch.int64)


def rows(tensor: Tensor) -> Tensor:
    """The elements of a tensor as [R, N / R], R at most `ROWS`. Adding up each row, then the sums, takes two kernels.

    One kernel that adds up the logits of a token takes several times as long, since it runs on few compute units.
    """
    count = math.gcd(tensor.numel(), ROWS)
    return tensor.reshape(count, tensor.numel() // count)


def append_digest(digests: Tensor, digest: Tensor) -> None:
    """Drop the first of the digests, [K] int64, and append `digest`, [1]. Changes `digests` in place."""
    digests.copy_(torch.cat((digests[1:], digest)))


def add_doubt(doubt: Tensor, values: Tensor) -> None:
    """Add 0 to doubt, [] fp32, or NaN if a value is not finite or the sum of the values overflows fp32."""
    doubt.add_(rows(values).sum(-1, dtype=torch.float32).sum(), alpha=0)
