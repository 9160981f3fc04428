"""The specification of `gated_delta_step` and `gated_delta_prefill`, and the arguments of their implementations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DeltaSpec(NamedTuple):
    """The specification of `gated_delta_step` and `gated_delta_prefill`.

    group: the number of value heads that share a key head. taps: the size of the convolution's kernel.
    """

    dtype: torch.dtype
    weight_dtype: torch.dtype
    state_dtype: torch.dtype
    device: torch.device
    key_dim: int
    value_dim: int
    group: int
    taps: int
    grad: bool


class DeltaCall(NamedTuple):
    """One call; see `gated_delta_step`."""

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor
    beta: Tensor
    decay: Tensor
    conv_weight: Tensor
    conv_state: Tensor
    state: Tensor
    log_rate: Tensor
    bias: Tensor
    norm_weight: Tensor
    eps: float


class PrefillCall(NamedTuple):
    """One call; see `hf_rocm.ops.gated_delta_prefill`."""

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor
    beta: Tensor
    decay: Tensor
    conv_weight: Tensor
    conv_state: Tensor | None
    state: Tensor | None
    log_rate: Tensor
    bias: Tensor
    norm_weight: Tensor
    eps: float
