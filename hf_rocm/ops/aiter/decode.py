"""Single queries against caches of different lengths through `mha_fwd`, which takes the lengths on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rocm import options
from hf_rocm.ops.aiter import detect
from hf_rocm.ops.aiter.attention import bind_mha_fwd, call_mha_fwd, limits, single_query_limits, with_sinks
from hf_rocm.ops.aiter.contract import why_not
from hf_rocm.ops.opaque import opaque
from hf_rocm.ops.triton import decode as split
from hf_rocm.options import Switch

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
    if not spec.one_query:
        return "mha_fwd takes lengths for single queries"
    if spec.starts or spec.window is not None:
        return "mha_fwd can't skip the first keys of a row"
    return single_query_limits(spec) or why_not(bind_mha_fwd(lengths=True)) or _gain(spec, device)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    starts: Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    ends: Tensor | None,
) -> Tensor:
    """See `hf_rocm.ops.decode_attention`; starts, window and softcap are always None here.

    Sinks go through the log-sum-exp.
    """
    if ends is None:
        held = lengths.clamp(max=key.shape[2]).expand(key.shape[0])
        ends = F.pad(held.cumsum(0, dtype=torch.int32), (1, 0))
    output: Tensor = _traced(query, key, value, ends, sinks, scale)
    return output


def _gain(spec: DecodeSpec, device: Device) -> str | None:
    """Why our own kernel comes first, unless this tier was asked for."""
    current = options.current()
    if spec.ends or current.tier("attention") == "aiter" or current.aiter["attention"] is Switch.REQUIRED:
        return None
    if split.refuses(spec, device) is not None:
        return None
    return "mha_fwd gives each key head one workgroup and needs running sums; our decode kernel splits the keys"


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
