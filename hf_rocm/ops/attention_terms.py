"""The keyword arguments of attention besides query, key and value. Every implementation receives all of them.

Their meaning is documented with the operations: `attention`, `varlen_attention`, `decode_attention`, `paged_attention`.
"""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

FEW_QUERIES = 16  # the largest S_q of decoding kernels


class AttentionTerms(TypedDict):
    """The keyword arguments of `hf_rocm.ops.attention`."""

    scale: float
    causal: bool
    mask: Tensor | None
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class VarlenTerms(TypedDict):
    """The keyword arguments of `hf_rocm.ops.varlen_attention`."""

    longest_query: int
    longest_key: int
    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class DecodeTerms(TypedDict):
    """The keyword arguments of `hf_rocm.ops.decode_attention`."""

    scale: float
    starts: Tensor | None
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    ends: Tensor | None


class PagedTerms(TypedDict):
    """The keyword arguments of `hf_rocm.ops.paged_attention`."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
