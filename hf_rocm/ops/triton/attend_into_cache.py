"""A step of a few tokens through hf_rocm's split-KV kernel: norms, rotation, the write to the cache, and attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.specs.attention import AttendIntoCacheCall
from hf_rocm.ops.triton import decode, rope

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.specs.attention import AttendIntoCacheSpec


def refuses(spec: AttendIntoCacheSpec, device: Device) -> str | None:
    """Why the kernel can't serve this call to `attend_into_cache`, or None."""
    return rope.refuses(spec, device) or decode.refuses(spec, device)


def attend_into_cache(call: AttendIntoCacheCall) -> tuple[Tensor, Tensor, Tensor]:
    """See `hf_rocm.ops.attend_into_cache`. Also returns the caches."""
    output: Tensor = _traced(*call)
    return output, call.keys, call.values


def _forward(*arguments: Any) -> Tensor:
    call = AttendIntoCacheCall(*arguments)
    norms = rope.Norms(call.query_norm, call.key_norm, call.query_eps, call.key_eps, call.one_plus)
    new = decode.NewKeys(call.key, call.value, call.cos, call.sin, call.position, norms, call.once)
    tensors = call.query, call.keys, call.values, call.lengths, call.starts, None, call.sinks, None
    return decode.forward(*tensors, call.scale, call.softcap, call.window, True, new)


def _attended(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))


_traced = opaque(
    "triton_attend_into_cache(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor lengths, "
    "Tensor(a!) keys, Tensor(b!) values, Tensor position, Tensor? starts, Tensor? sinks, Tensor? query_norm, "
    "Tensor? key_norm, float query_eps, float key_eps, bool one_plus, bool once, float scale, float? softcap, "
    "int? window) -> Tensor",
    _forward,
    _attended,
)
