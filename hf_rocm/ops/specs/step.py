"""The specification of `finish_step`."""

from __future__ import annotations

from typing import NamedTuple

import torch


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
