"""The specifications of norms, activations and rotary embeddings, and the parameters of a norm."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Norm(NamedTuple):
    """The parameters of an RMS norm; see `hf_rocm.ops.rms_norm`."""

    weight: Tensor
    eps: float
    one_plus: bool = False


class NormSpec(NamedTuple):
    """The specification of `rms_norm` and `add_rms_norm`."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    dim: int
    one_plus: bool
    grad: bool


class NormAddSpec(NamedTuple):
    """The specification of `norm_add`.

    weight_dtype: the dtype of the norms' weights. following: whether the sum is normalised.
    """

    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    dim: int
    one_plus: bool
    following: bool
    grad: bool


class LayerNormSpec(NamedTuple):
    """The specification of `add_layer_norm`.

    weight_dtype: the dtype of weight and bias. keep_sum: whether to return the sum.
    """

    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    dim: int
    biased: bool
    keep_sum: bool
    grad: bool


class ActivationSpec(NamedTuple):
    """The specification of `act_and_mul`. dim: d, half of the last dim."""

    dtype: torch.dtype
    device: torch.device
    dim: int
    activation: str
    grad: bool
    interleaved: bool = False


class ActSpec(NamedTuple):
    """The specification of `act`."""

    dtype: torch.dtype
    device: torch.device
    activation: str
    grad: bool


class RotaryAnglesSpec(NamedTuple):
    """The specification of `rotary_angles`. dtype: that of cos and sin. frequencies: R / 2."""

    dtype: torch.dtype
    freq_dtype: torch.dtype
    position_dtype: torch.dtype
    device: torch.device
    frequencies: int
    layout: str
    grad: bool


class RopeSpec(NamedTuple):
    """The specification of `rope`."""

    dtype: torch.dtype
    angle_dtype: torch.dtype
    device: torch.device
    head_dim: int
    rotated: int
    interleaved: bool
    # One table of angles for the whole batch.
    shared: bool
    grad: bool


class RopeIntoCacheSpec(NamedTuple):
    """The specification of `rope_into_cache`.

    counted: whether the position is a counter, which is advanced; None: there is no position. once: whether cos and sin
    contain each angle once.
    """

    dtype: torch.dtype
    angle_dtype: torch.dtype
    device: torch.device
    head_dim: int
    value_dim: int
    rotated: int
    interleaved: bool
    # One table of angles for the whole batch.
    shared: bool
    counted: bool | None
    # A single token.
    one: bool
    once: bool
    # The dtype of the norms' weights.
    norm_dtype: torch.dtype | None
    one_plus: bool
    grad: bool
