"""The specifications of routed experts and of the routing, and the arguments of their implementations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ExpertsSpec(NamedTuple):
    """The specification of `experts` and its variants. experts: E; hidden: H; intermediate: I; top_k: k."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    experts: int
    hidden: int
    intermediate: int
    top_k: int
    activation: str
    bias: bool
    transposed: bool
    interleaved: bool
    weigh_input: bool
    # Whether both weights are contiguous.
    contiguous: bool
    # token-expert pairs, rounded up to the next bound of the operation; `moe.MANY` above the largest bound.
    pairs: int
    traced: bool
    grad: bool


class Form(NamedTuple):
    """The layout of the weights, whether the routing weights scale the input, and the operation between the two GEMMs;
    see `hf_rocm.ops.experts`."""

    activation: str = "silu"
    transposed: bool = False
    interleaved: bool = False
    weigh_input: bool = False
    limit: float = 7.0
    alpha: float = 1.702


class ExpertsCall(NamedTuple):
    """The arguments of `hf_rocm.ops.experts`, as its implementations take them."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    ids: Tensor
    weights: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    form: Form


class ExpertsAddCall(NamedTuple):
    """The arguments of `experts_add`, as its implementations take them: `residual`, then those of `experts`."""

    residual: Tensor
    x: Tensor
    gate_up: Tensor
    down: Tensor
    ids: Tensor
    weights: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    form: Form


class Mxfp4Call(NamedTuple):
    """The arguments of `mxfp4_experts`, as its implementations take them."""

    x: Tensor
    gate_up: Tensor
    gate_up_scales: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_scales: Tensor
    down_bias: Tensor | None
    ids: Tensor
    weights: Tensor
    activation: str
    limit: float
    alpha: float


class RoutingSpec(NamedTuple):
    """The specification of `choose_experts`. experts: E; top_k: k; weight_dtype: the dtype of the returned weights."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    experts: int
    top_k: int
    scores: str
    biased: bool
    groups: int
    chosen_groups: int
    best: int
    normalise: bool
    grad: bool


class RoutingCall(NamedTuple):
    """One call; see `choose_experts`. dtype: the dtype of the weights."""

    logits: Tensor
    bias: Tensor | None
    top_k: int
    scores: str
    groups: int
    chosen_groups: int
    best: int
    normalise: bool
    epsilon: float
    scale: float
    dtype: torch.dtype
