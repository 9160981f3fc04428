"""decode_attention: the last few queries against caches that are filled to different lengths, known only to the device.

A static cache holds unwritten keys behind the written ones; its length changes with every step without a word to the
host, so that a recorded graph of the step stays valid. A sliding one rolls: once full it holds the last S keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm.device import Device
from hf_rocm.ops import attention_eager, attention_torch
from hf_rocm.ops.aiter import decode as aiter
from hf_rocm.ops.aiter.detect import checked
from hf_rocm.ops.registry import Implementation, Operation, refuses_nothing, route
from hf_rocm.ops.triton import decode as triton
from hf_rocm.ops.triton.detect import checked as checked_triton

FEW_QUERIES = 16  # what decoding kernels take at a time


class DecodeSpec(NamedTuple):
    """What the choice of an implementation depends on."""

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
    ends: bool = False  # the running sum of the lengths is at hand


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    starts: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last S_q queries of each row to the written keys of its row.

    query: [B, H, S_q, D]; key: [B, Hkv, S, D]; value: [B, Hkv, S, D_v], any strides whose last is 1. lengths: [B], or
    [1] for all rows alike, int32 or int64 on the same device: how many keys the row has had, those of the queries
    included, at least one. Up to S they lie at the front, and what is behind them is never seen; with more, the keys
    are those of a rolling cache, the last S, oldest first. starts: [B], the first key of each row that counts (after
    left padding), in the same count as lengths. window: how many keys a query sees, itself included. sinks: [H].
    ends: [B + 1] int32, the running sum of the rows' lengths from 0 where the caller has it, which one kernel wants.

    Query i of S_q stands at key length − S_q + i. One that sees nothing (left padding among the queries) gets what
    `attention` gives such a query. What lies outside must be finite in PyTorch's tiers; the kernels don't read it.
    Nothing is read on the host. Returns [B, S_q, H, D_v].
    """
    _, heads, s_q, head_dim = query.shape
    _, kv_heads, _, value_dim = value.shape
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    spec = (
        query.dtype,
        query.device,
        heads,
        kv_heads,
        head_dim,
        value_dim,
        softcap is not None,
        sinks is not None,
        grad,
        s_q == 1,
        s_q <= FEW_QUERIES,
        starts is not None,
        window,
        ends is not None,
    )
    serve = route(_operation, spec, query, key, value)
    result: Tensor = serve(
        query, key, value, lengths, scale=scale, starts=starts, window=window, softcap=softcap, sinks=sinks, ends=ends
    )
    return result


def seen_keys(s_q: int, s_k: int, lengths: Tensor, starts: Tensor | None, window: int | None) -> Tensor:
    """[B | 1, 1, S_q, S] bool: which keys each query sees, made on the device."""
    places = torch.arange(s_k, device=lengths.device)
    written = lengths.clamp(max=s_k)
    positions = (written[:, None] - s_q + torch.arange(s_q, device=lengths.device))[:, :, None]
    seen = places <= positions
    if starts is not None:
        seen = seen & (places >= (starts - (lengths - written))[:, None, None])
    if window is not None:
        seen = seen & (places > positions - window)
    return seen[:, None]


def torch_decode(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, **how: Any) -> Tensor:
    """SDPA with a mask that is made on the device."""
    return _masked(attention_torch.attention, query, key, value, lengths, **how)


def eager_decode(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, **how: Any) -> Tensor:
    """The oracle."""
    return _masked(attention_eager.attention, query, key, value, lengths, **how)


def _masked(
    attend: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    starts: Tensor | None = None,
    window: int | None = None,
    ends: Tensor | None = None,
    **how: Any,
) -> Tensor:
    mask = seen_keys(query.shape[2], key.shape[2], lengths, starts, window)
    output: Tensor = attend(query, key, value, causal=False, window=None, mask=mask, **how)[0]
    return output


def _torch_refuses(spec: DecodeSpec, device: Device) -> str | None:
    if spec.softcap:
        return "SDPA has no softcap"
    return "SDPA has no sinks" if spec.sinks else None


_operation = Operation("decode_attention", DecodeSpec, family="attention")
_operation.register(
    Implementation(
        "aiter",
        "mha_fwd, lengths",
        aiter.refuses,
        aiter.attention,
        checked("decode_attention", "mha_fwd, lengths"),
    )
)
_operation.register(
    Implementation(
        "triton",
        "decode_kernel",
        triton.refuses,
        triton.decode_attention,
        checked_triton("decode_attention", "decode_kernel"),
    )
)
_operation.register(Implementation("torch", "SDPA, masked", _torch_refuses, torch_decode))
_operation.register(Implementation("eager", "softmax, masked", refuses_nothing, eager_decode))
