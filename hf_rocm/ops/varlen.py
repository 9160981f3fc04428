"""varlen_attention: attention over sequences of different lengths laid end to end, without padding."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hf_rocm.device import Device
from hf_rocm.ops import attention_eager, attention_torch
from hf_rocm.ops.aiter import varlen as aiter
from hf_rocm.ops.aiter.detect import checked
from hf_rocm.ops.registry import Implementation, Operation, refuses_nothing, route


class VarlenSpec(NamedTuple):
    """What the choice of an implementation depends on."""

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


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    *,
    longest_query: int,
    longest_key: int,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`attention` for each sequence by itself.

    query: [T_q, H, D]; key: [T_k, Hkv, D]; value: [T_k, Hkv, D_v]. query_ends, key_ends: [B + 1] int32 on the same
    device, where sequence i lies between its entries i and i + 1 (the first is 0). longest_…: the greatest length.
    A causal or windowed sequence must have at least as many keys as queries. Returns [T_q, H, D_v].
    """
    _, heads, head_dim = query.shape
    _, kv_heads, value_dim = value.shape
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    spec = (
        query.dtype,
        query.device,
        heads,
        kv_heads,
        head_dim,
        value_dim,
        causal,
        window,
        softcap is not None,
        False,
        grad,
    )
    result: Tensor = route(_operation, spec, query, key, value)(
        query,
        key,
        value,
        query_ends,
        key_ends,
        longest_query=longest_query,
        longest_key=longest_key,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
    )
    return result


def torch_varlen(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor, **how: object
) -> Tensor:
    """SDPA for one sequence after the other; reads the lengths on the host."""
    return _one_by_one(attention_torch.attention, query, key, value, query_ends, key_ends, how)


def eager_varlen(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor, **how: object
) -> Tensor:
    """The oracle: plain attention for one sequence after the other."""
    return _one_by_one(attention_eager.attention, query, key, value, query_ends, key_ends, how)


def _one_by_one(
    attend: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    how: dict[str, object],
) -> Tensor:
    kept = {name: how[name] for name in ("scale", "causal", "window", "softcap")}
    queries, keys = pairwise(query_ends.tolist()), pairwise(key_ends.tolist())
    outputs = [query.new_empty(0, query.shape[1], value.shape[2])]
    for (a, b), (c, d) in zip(queries, keys, strict=True):
        one = (each.transpose(0, 1).unsqueeze(0) for each in (query[a:b], key[c:d], value[c:d]))
        outputs.append(attend(*one, mask=None, sinks=None, **kept)[0][0])  # type: ignore[operator]
    return torch.cat(outputs)


def _torch_refuses(spec: VarlenSpec, device: Device) -> str | None:
    return "SDPA has no softcap" if spec.softcap else None


_operation = Operation("varlen_attention", VarlenSpec, family="attention")
_operation.register(
    Implementation(
        "aiter",
        "flash_attn_varlen_func",
        aiter.packed_refuses,
        aiter.packed,
        checked("varlen_attention", "flash_attn_varlen_func"),
    )
)
_operation.register(Implementation("torch", "SDPA, one by one", _torch_refuses, torch_varlen))
_operation.register(Implementation("eager", "softmax, one by one", refuses_nothing, eager_varlen))
