"""The specifications of attention, and the arguments of its implementations.

Every implementation receives all of these arguments. Their meaning is documented with the operations: `attention`,
`varlen_attention`, `decode_attention`, `attend_into_cache`, `paged_attention`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor

# The largest S_q that decode kernels support.
FEW_QUERIES = 16


class AttentionSpec(NamedTuple):
    """The specification of `attention`."""

    dtype: torch.dtype
    device: torch.device
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    one_query: bool  # S_q == 1
    square: bool  # S_q == S_k
    more_queries: bool  # S_q > S_k
    causal: bool
    window: int | None
    softcap: bool
    sinks: bool
    mask: torch.dtype | None
    grad: bool
    weights: bool
    # 1 < S_q ≤ FEW_QUERIES, S_q < S_k.
    few_queries: bool = False


class AttentionTerms(TypedDict):
    """The keyword arguments that the implementations of `attention` receive."""

    scale: float
    causal: bool
    mask: Tensor | None
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class VarlenSpec(NamedTuple):
    """The specification of `varlen_attention`."""

    dtype: torch.dtype
    device: torch.device
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool
    window: int | None
    softcap: bool
    sinks: bool
    grad: bool
    lse: bool = False


class VarlenTerms(TypedDict):
    """The keyword arguments of `varlen_attention`."""

    longest_query: int
    longest_key: int
    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    lse: bool


class DecodeSpec(NamedTuple):
    """The specification of `decode_attention`."""

    dtype: torch.dtype
    device: torch.device
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    softcap: bool
    sinks: bool
    grad: bool
    one_query: bool = True  # S_q == 1
    few_queries: bool = True  # S_q ≤ FEW_QUERIES
    starts: bool = False
    window: int | None = None
    # The caller passes the cumulative lengths.
    ends: bool = False


class DecodeTerms(TypedDict):
    """The keyword arguments of `decode_attention`."""

    scale: float
    starts: Tensor | None
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    ends: Tensor | None


class AttendIntoCacheCall(NamedTuple):
    """The arguments of `attend_into_cache`. Its norms are split into weights, [D] or None, and settings."""

    query: Tensor
    key: Tensor
    value: Tensor
    cos: Tensor
    sin: Tensor
    lengths: Tensor
    keys: Tensor
    values: Tensor
    position: Tensor
    starts: Tensor | None
    sinks: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    query_eps: float
    key_eps: float
    one_plus: bool
    once: bool
    scale: float
    softcap: float | None
    window: int | None


class AttendIntoCacheSpec(NamedTuple):
    """The specification of `attend_into_cache`."""

    dtype: torch.dtype
    angle_dtype: torch.dtype
    device: torch.device
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rotated: int
    # One table of angles for the whole batch.
    shared: bool
    # cos and sin contain each angle once.
    once: bool
    # The dtype of the norms' weights.
    norm_dtype: torch.dtype | None
    one_plus: bool
    softcap: bool
    sinks: bool
    starts: bool
    window: int | None
    grad: bool
    one_query: bool = True  # S == 1
    few_queries: bool = True  # S ≤ FEW_QUERIES


class PagedSpec(NamedTuple):
    """The specification of `paged_attention`."""

    dtype: torch.dtype
    device: torch.device
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    page: int
    softcap: bool
    sinks: bool
    grad: bool = False
    few_queries: bool = True  # S_q ≤ FEW_QUERIES
    # The call writes keys and values.
    new: bool = True
    window: int | None = None
    slots: bool = False


class PagedTerms(TypedDict):
    """The keyword arguments of `paged_attention`."""

    slots: Tensor | None
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class Attends(Protocol):
    """The protocol of the argument `padded` of `ops.attention`."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention; the arguments are those of `ops.attention`. Returns [B, S_q, H, D_v]."""
