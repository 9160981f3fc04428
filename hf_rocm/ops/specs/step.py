"""The specifications of the operations that end a decode step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class FinishStepCall(NamedTuple):
    """The terms of `finish_step`. words: the bits of the logits as integers, see `ops.bits.words`."""

    logits: Tensor
    words: Tensor
    out: Tensor
    tokens: Tensor
    digests: Tensor
    doubt: Tensor
    further: Tensor | None


class FinishStepSpec(NamedTuple):
    """The specification of `finish_step`.

    words_dtype: the dtype of the integers with the bits of the logits. rows: B · N. dim: V. kept:
    the number of digests. further: whether there is a digest of further tensors. contiguous: whether all tensors are.
    """

    dtype: torch.dtype
    words_dtype: torch.dtype
    device: torch.device
    rows: int
    dim: int
    kept: int
    further: bool
    contiguous: bool
    grad: bool


class AppendTokensSpec(NamedTuple):
    """The specification of `append_tokens`.

    dtype: that of the ids. rows: B. ends: the number of end tokens. padded: whether there is a padding token.
    contiguous, wide, here: whether all tensors are contiguous, have dtype int64, and are on the device of the ids.
    """

    dtype: torch.dtype
    device: torch.device
    rows: int
    ends: int
    padded: bool
    contiguous: bool
    wide: bool
    here: bool
    grad: bool = False
