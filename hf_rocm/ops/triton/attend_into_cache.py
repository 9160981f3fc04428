"""A step of one token through hf_rocm's split-KV kernel: norms, rotation, the write to the cache, and attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.triton import decode, rope

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.specs.attention import AttendIntoCacheSpec


def refuses(spec: AttendIntoCacheSpec, device: Device) -> str | None:
    """Why the kernel can't serve this call of `attend_into_cache`, or None."""
    return rope.refuses(spec, device) or decode.limits(spec, device)


def attend_into_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    starts: Tensor | None,
    sinks: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    query_eps: float,
    key_eps: float,
    one_plus: bool,
    once: bool,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `hf_rocm.ops.attend_into_cache`."""
    tensors = query, key, value, cos, sin, lengths, keys, values, position, starts, sinks, query_norm, key_norm
    output: Tensor = _traced(*tensors, query_eps, key_eps, one_plus, once, scale, softcap, window)
    return output, keys, values


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    starts: Tensor | None,
    sinks: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    query_eps: float,
    key_eps: float,
    one_plus: bool,
    once: bool,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    norms = rope.Norms(query_norm, key_norm, query_eps, key_eps, one_plus)
    new = decode.NewKey(key, value, cos, sin, position, norms, once)
    return decode.forward(query, keys, values, lengths, starts, None, sinks, None, scale, softcap, window, True, new)


def _attended(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty((query.shape[0], 1, query.shape[1], value.shape[3]))


_traced = opaque(
    "triton_attend_into_cache(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor lengths, "
    "Tensor(a!) keys, Tensor(b!) values, Tensor position, Tensor? starts, Tensor? sinks, Tensor? query_norm, "
    "Tensor? key_norm, float query_eps, float key_eps, bool one_plus, bool once, float scale, float? softcap, "
    "int? window) -> Tensor",
    _forward,
    _attended,
)
