"""decode_attention: attention of the last few queries over caches whose lengths are known only on the device.

The last slots of a static cache may be unwritten. Its length changes with every step, but only on the device,
so that a recorded graph of the step stays valid. A sliding cache rolls: once it is full, it contains the last S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, compiler

from hf_rocm.device import Device
from hf_rocm.ops import attention_eager, registry
from hf_rocm.ops.aiter import decode as aiter
from hf_rocm.ops.aiter.detect import checked
from hf_rocm.ops.attention import torch_attention
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.probe_cases import LENGTH, LONG, Draw, small_window
from hf_rocm.ops.registry import Case, Implementation, Operation, refuses_nothing
from hf_rocm.ops.specs.attention import FEW_QUERIES, AttendIntoCacheSpec, AttentionTerms, DecodeSpec, DecodeTerms
from hf_rocm.ops.triton import decode as triton
from hf_rocm.ops.triton.detect import checked as checked_triton

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
    """Causal attention of the last S_q queries of each row over the written keys of the row.

    query: [B, H, S_q, D]; key: [B, Hkv, S, D]; value: [B, Hkv, S, D_v], with any strides, but the last one must be 1.
    lengths: [B], or [1] for all rows, int32 or int64 on the same device: the number of keys of the row so far,
    including the keys of these queries; at least 1. If it is at most S, the keys are at the front and the rest of the
    cache is not used. Otherwise the cache is a rolling one and contains the last S keys, oldest first. starts: [B], the
    first key of each row after left padding, counted like lengths. window: how many keys a query attends to, including
    its own. softcap, sinks: see `attention`. ends: [B + 1] int32, the cumulative lengths of the rows, starting at 0,
    which only aiter's kernel needs; if None, they are computed for that kernel.

    Query i of S_q has the same position as key length − S_q + i. A query that attends to no key (left padding) gets the
    same output as in `attention`. Unused keys and values must be finite in PyTorch's tiers; kernels don't read them. No
    tensor is read on the host. Returns [B, S_q, H, D_v].
    """
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    dtype, device = query.dtype, query.device
    _, heads, s_q, head_dim = query.shape
    _, kv_heads, _, value_dim = value.shape
    one_query, few_queries = s_q == 1, s_q <= FEW_QUERIES
    spec = (
        dtype,
        device,
        heads,
        kv_heads,
        head_dim,
        value_dim,
        softcap is not None,
        sinks is not None,
        grad,
        one_query,
        few_queries,
        starts is not None,
        window,
        ends is not None,
    )
    serve = _operation.traced(spec) if compiling() or compiler._is_compiling_flag else _operation.calls[spec]
    result: Tensor = serve(
        query, key, value, lengths, scale=scale, starts=starts, window=window, softcap=softcap, sinks=sinks, ends=ends
    )
    return result


def kernel_serves(query: Tensor, key: Tensor, value: Tensor, *, softcap: bool = False, sinks: bool = False) -> bool:
    """Whether a kernel serves single queries on these caches, given the cumulative lengths."""
    spec = DecodeSpec(
        dtype=query.dtype,
        device=query.device,
        heads=query.shape[1],
        kv_heads=value.shape[1],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        softcap=softcap,
        sinks=sinks,
        grad=torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
        ends=True,
    )
    return registry.kernel_serves(_operation, spec)


def seen_keys(s_q: int, s_k: int, lengths: Tensor, starts: Tensor | None, window: int | None) -> Tensor:
    """Return a mask of the keys that each query attends to, computed on the device: [B | 1, 1, S_q, S] bool."""
    places = torch.arange(s_k, device=lengths.device)
    written = lengths.clamp(max=s_k)
    positions = (written[:, None] - s_q + torch.arange(s_q, device=lengths.device))[:, :, None]
    seen = places <= positions
    if starts is not None:
        seen = seen & (places >= (starts - (lengths - written))[:, None, None])
    if window is not None:
        seen = seen & (places > positions - window)
    return seen[:, None]


def _masked(attention: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., Tensor]:
    """Implement `decode_attention` with this attention function and a mask that is computed on the device."""

    def decode(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, **terms: Unpack[DecodeTerms]) -> Tensor:
        mask = seen_keys(query.shape[2], key.shape[2], lengths, terms.get("starts"), terms.get("window"))
        dense = AttentionTerms(
            scale=terms["scale"], causal=False, mask=mask, window=None, softcap=terms["softcap"], sinks=terms["sinks"]
        )
        return attention(query, key, value, **dense)[0]

    return decode


torch_decode = _masked(torch_attention)
# The oracle.
eager_decode = _masked(attention_eager.attention)


def torch_refuses(spec: DecodeSpec | AttendIntoCacheSpec, device: Device) -> str | None:
    if spec.softcap:
        return "SDPA has no softcap"
    return "SDPA has no sinks" if spec.sinks else None


def _kind(spec: DecodeSpec) -> DecodeSpec:
    return small_window(spec)._replace(ends=False)


def _cases(spec: DecodeSpec) -> Iterator[Case]:
    """Rows of several lengths. Values of unused keys are large, so that attention to one of them changes the result."""
    draw = Draw(spec.dtype, spec.device)
    s_q = 1 if spec.one_query else 5 if spec.few_queries else LENGTH
    lengths, starts = (s_q, LENGTH, LONG - 1), (0, 3, LONG - 1 - s_q)
    key = draw(3, spec.kv_heads, LONG, spec.head_dim)
    value = draw(3, spec.kv_heads, LONG, spec.value_dim)
    for row, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        value[row, :, length:] = 1000.0
        value[row, :, : start if spec.starts else 0] = 1000.0
    terms = DecodeTerms(
        scale=spec.head_dim**-0.5,
        starts=torch.tensor(starts, dtype=torch.int32, device=spec.device) if spec.starts else None,
        window=spec.window,
        softcap=2.0 if spec.softcap else None,
        sinks=draw(spec.heads) if spec.sinks else None,
        ends=None,
    )
    query = draw(3, s_q, spec.heads, spec.head_dim).transpose(1, 2)
    yield Case((query, key, value, torch.tensor(lengths, dtype=torch.int32, device=spec.device)), keywords=terms)


_operation = Operation("decode_attention", DecodeSpec, _cases, _kind, family="attention", recorded=(0, 1, 2))
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
_operation.register(Implementation("torch", "SDPA, masked", torch_refuses, torch_decode))
_operation.register(Implementation("eager", "softmax, masked", refuses_nothing, eager_decode))
