"""The specifications of `linear`, `shuffled_linear` and `fused_linear`."""

from __future__ import annotations

from typing import NamedTuple

import torch

# In a specification: more rows than the operation's `FEW`, or no rows.
MANY = 0


class LinearSpec(NamedTuple):
    """The specification of `linear` and `shuffled_linear`. k, n: a GEMM of [M, K] by [N, K]ᵀ."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    n: int
    k: int
    bias_dtype: torch.dtype | None
    # Whether the weight is contiguous.
    contiguous: bool
    grad: bool
    # M rounded up to a power of two, or MANY.
    rows: int = MANY


class FusedLinearSpec(NamedTuple):
    """The specification of `fused_linear`.

    n, k: the weight's sizes. norm_dtype: the dtype of the norm's weight, or None; one_plus: whether the norm multiplies
    by (1 + w).
    """

    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    n: int
    k: int
    bias_dtype: torch.dtype | None
    # Whether the weight is contiguous.
    contiguous: bool
    norm_dtype: torch.dtype | None
    one_plus: bool
    activation: str | None
    residual: bool
    grad: bool
    # As in LinearSpec.
    rows: int
