"""Single queries over caches of different lengths through `mha_fwd`, which reads the lengths on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rocm import options
from hf_rocm.ops.aiter import detect
from hf_rocm.ops.aiter.attention import bind_mha_fwd, call_mha_fwd, limits, single_query_limits, with_sinks
from hf_rocm.ops.aiter.contract import why_not
from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.fakes import attended
from hf_rocm.ops.triton import decode as split
from hf_rocm.options import Switch

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hf_rocm.device import Device
    from hf_rocm.ops.specs.attention import DecodeSpec, DecodeTerms


def refuses(spec: DecodeSpec, device: Device) -> str | None:
    reason = detect.unavailable(device) or limits(spec)
    if reason is not None:
        return reason
    if spec.grad:
        return "mha_fwd has no gradient"
    if spec.softcap:
        return "mha_fwd has no softcap"
    if not spec.one_query:
        return "mha_fwd takes lengths only for single queries"
    if spec.starts or spec.window is not None:
        return "mha_fwd can't skip the first keys of a row"
    return single_query_limits(spec) or why_not(bind_mha_fwd(lengths=True)) or _gain(spec, device)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    **terms: Unpack[DecodeTerms],
) -> Tensor:
    """See `hf_rocm.ops.decode_attention`; starts, window and softcap are always None here.

    Sinks are applied through the log-sum-exp.
    """
    ends = terms["ends"]
    if ends is None:
        written = lengths.clamp(max=key.shape[2]).expand(key.shape[0])
        ends = F.pad(written.cumsum(0, dtype=torch.int32), (1, 0))
    output: Tensor = _traced(query, key, value, ends, terms["sinks"], terms["scale"])
    return output


def _gain(spec: DecodeSpec, device: Device) -> str | None:
    """The reason why hf_rocm's kernel is preferred; None if it is not, or if the user requested the aiter tier."""
    current = options.current()
    if spec.ends or current.tier("attention") == "aiter" or current.aiter["attention"] is Switch.REQUIRED:
        return None
    if split.refuses(spec, device) is not None:
        return None
    return (
        "mha_fwd uses one workgroup for each key head and needs cumulative sequence lengths; hf_rocm's decode kernel "
        "splits the keys"
    )


def _forward(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, sinks: Tensor | None, scale: float) -> Tensor:
    if query.numel() == 0:
        return attended(query, key, value)
    output, lse = call_mha_fwd(query, key, value, scale, False, -1, -1, lse=sinks is not None, lengths=ends)
    return output.contiguous() if sinks is None else with_sinks(output, lse, sinks)


_traced = opaque(
    "aiter_decode(Tensor query, Tensor key, Tensor value, Tensor ends, Tensor? sinks, float scale) -> Tensor",
    _forward,
    attended,
)
