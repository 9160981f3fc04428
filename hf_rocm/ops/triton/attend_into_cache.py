"""A step of one token through hf_rocm's split-KV kernel: norms, rotation, the write to the cache, and attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.triton import decode, rope
from hf_rocm.ops.triton.launch import dense

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


class NewKey(NamedTuple):
    """A key and a value that the kernel rotates and writes, with the positions and norms of a step."""

    key: Tensor
    value: Tensor
    cos: Tensor
    sin: Tensor
    place: Tensor
    norms: rope.Norms
    once: bool

    @property
    def rotation(self) -> tuple[int, bool, bool]:
        """The kernel's arguments ROTATED, ONE_PLUS and ONCE."""
        return self.cos.shape[-1] * (2 if self.once else 1), self.norms.one_plus, self.once

    @property
    def arguments(self) -> tuple[tuple[Tensor | None, ...], tuple[float, float], tuple[int, ...]]:
        """The tensors, the epsilons and the strides that the kernel takes."""
        key, value, cos, sin = dense(self.key), dense(self.value), self.cos.contiguous(), self.sin.contiguous()
        weights = tuple(None if weight is None else weight.contiguous() for weight in self.norms[:2])
        strides = (*key.stride()[:2], *value.stride()[:2], 0 if cos.shape[0] == 1 else cos.stride(0))
        return (key, value, cos, sin, self.place, *weights), (self.norms.query_eps, self.norms.key_eps), strides


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
    new = NewKey(key, value, cos, sin, position, norms, once)
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
