"""Single queries against caches of different lengths through `mha_fwd`, which takes the lengths on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from hf_rocm.ops.aiter import detect
from hf_rocm.ops.aiter.attention import bind_mha_fwd, call_mha_fwd, limits, single_query_limits, with_sinks
from hf_rocm.ops.aiter.contract import why_not
from hf_rocm.ops.aiter.opaque import opaque

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.decode import DecodeSpec


def refuses(spec: DecodeSpec, device: Device) -> str | None:
    reason = detect.unavailable(device) or limits(spec)
    if reason is not None:
        return reason
    if spec.grad:
        return "mha_fwd has no gradient"
    if spec.softcap:
        return "mha_fwd has no softcap"
    return single_query_limits(spec) or why_not(bind_mha_fwd(lengths=True))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """See `hf_rocm.ops.decode_attention`; softcap is always None here. Sinks go through the log-sum-exp."""
    output: Tensor = _traced(query, key, value, ends, sinks, scale)
    return output


def _forward(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, sinks: Tensor | None, scale: float) -> Tensor:
    if query.numel() == 0:
        return _shape(query, key, value)
    output, lse = call_mha_fwd(query, key, value, scale, False, -1, -1, lse=sinks is not None, lengths=ends)
    return output.contiguous() if sinks is None else with_sinks(output, lse, sinks)


def _shape(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))


_traced = opaque(
    "aiter_decode(Tensor query, Tensor key, Tensor value, Tensor ends, Tensor? sinks, float scale) -> Tensor",
    _forward,
    _shape,
)
