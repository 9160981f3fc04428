"""decode_attention: single queries against caches that are filled to different lengths, known only to the device.

A static cache holds unwritten keys behind the written ones; its length changes with every step without a word to the
host, so that a recorded graph of the step stays valid.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm.device import Device
from hf_rocm.ops import attention_eager, attention_torch
from hf_rocm.ops.aiter import decode as aiter
from hf_rocm.ops.aiter.detect import checked
from hf_rocm.ops.registry import Implementation, Operation, route


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


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one query a row to the first keys of its row.

    query: [B, H, 1, D]; key: [B, Hkv, S, D]; value: [B, Hkv, S, D_v]; ends: [B + 1] int32 on the same device, the
    running sum of the rows' lengths from 0 (row b sees its first ends[b + 1] − ends[b] keys, at least one and at most
    S); what lies behind them must be finite. sinks: [H]. Nothing is read on the host. Returns [B, 1, H, D_v].
    """
    _, heads, _, head_dim = query.shape
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
    )
    serve = route(_operation, spec, query, key, value)
    result: Tensor = serve(query, key, value, ends, scale=scale, softcap=softcap, sinks=sinks)
    return result


def torch_decode(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, **how: Any) -> Tensor:
    """SDPA with a mask that is made on the device."""
    return _masked(attention_torch.attention, query, key, value, ends, how)


def eager_decode(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, **how: Any) -> Tensor:
    """The oracle."""
    return _masked(attention_eager.attention, query, key, value, ends, how)


def _masked(attend: Any, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, how: dict[str, Any]) -> Tensor:
    seen = torch.arange(key.shape[2], device=key.device)[None, :] < ends.diff()[:, None]
    output: Tensor = attend(query, key, value, causal=False, window=None, mask=seen[:, None, None, :], **how)[0]
    return output


def _torch_refuses(spec: DecodeSpec, device: Device) -> str | None:
    if spec.softcap:
        return "SDPA has no softcap"
    return "SDPA has no sinks" if spec.sinks else None


def _eager_refuses(spec: DecodeSpec, device: Device) -> str | None:
    return None


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
_operation.register(Implementation("torch", "SDPA, masked", _torch_refuses, torch_decode))
_operation.register(Implementation("eager", "softmax, masked", _eager_refuses, eager_decode))
