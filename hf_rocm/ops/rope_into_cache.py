"""rope_into_cache: rotate queries and keys, and put keys and values into a static cache where the device says."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_rocm import options
from hf_rocm.ops.registry import Implementation, Operation, kernel_serves, refuses_nothing, route
from hf_rocm.ops.rope import eager_rope, torch_rope
from hf_rocm.ops.triton import detect as triton_detect
from hf_rocm.ops.triton import rope as triton
from hf_rocm.options import Switch


class RopeIntoCacheSpec(NamedTuple):
    """What the choice of an implementation depends on."""

    dtype: torch.dtype
    angle_dtype: torch.dtype
    device: torch.device
    head_dim: int
    value_dim: int
    rotated: int
    interleaved: bool
    shared: bool  # one table of angles for the whole batch
    counted: bool  # the position is a count, which grows
    one: bool  # a single token
    grad: bool


def rope_into_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    interleaved: bool = False,
) -> Tensor:
    """`rope`, then keys[:, :, p] = key and values[:, :, p] = value, without reading p on the host.

    query: [B, H, S, D]; key: [B, Hkv, S, D]; value: [B, Hkv, S, D_v]; cos, sin: see `rope`. keys: [B, Hkv, L, D];
    values: [B, Hkv, L, D_v]; both are written to. position: int64, either [S], the place of each token, or a scalar,
    the number of tokens that there were before, to which S is added. Returns the rotated query, like query. A token
    without a place in the cache isn't written; the Triton tier makes its query NaN, the others raise as `index_copy_`.
    """
    spec = _spec(query, key, value, cos, position, interleaved)
    serve = route(_operation, spec, query, key, keys)
    out: Tensor = serve(query, key, value, cos, sin, keys, values, position, interleaved)[0]
    return out


def one_kernel(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, position: Tensor, *, interleaved: bool = False
) -> bool:
    """Whether a kernel does all of `rope_into_cache` at once, so that it gains something over two calls."""
    if options.current().aiter["rope"] is Switch.REQUIRED:
        return False
    return kernel_serves(_operation, _spec(query, key, value, cos, position, interleaved))


def _spec(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, position: Tensor, interleaved: bool
) -> tuple[object, ...]:
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    return (
        query.dtype,
        cos.dtype,
        query.device,
        query.shape[-1],
        value.shape[-1],
        cos.shape[-1],
        interleaved,
        cos.shape[0] == 1,
        position.ndim == 0,
        query.shape[0] * query.shape[2] == 1,
        grad,
    )


def torch_rope_into_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the unfused layers and transformers' static cache do."""
    query, key = torch_rope(query, key, cos, sin, interleaved)
    return query, *_put(key, value, keys, values, position)


def eager_rope_into_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The oracle: in at least fp32, rounded once at the end."""
    query, key = eager_rope(query, key, cos, sin, interleaved)
    return query, *_put(key, value, keys, values, position)


def _put(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    places = position
    if position.ndim == 0:
        places = torch.arange(key.shape[2], device=position.device) + position
        position.add_(key.shape[2])
    return keys.index_copy_(2, places, key), values.index_copy_(2, places, value)


_operation = Operation("rope_into_cache", RopeIntoCacheSpec, family="rope")
_operation.register(
    Implementation(
        "triton",
        "rope_kernel",
        triton.refuses,
        triton.rope_into_cache,
        triton_detect.checked("rope_into_cache", "rope_kernel"),
    )
)
_operation.register(Implementation("torch", "rope, index_copy_", refuses_nothing, torch_rope_into_cache))
_operation.register(Implementation("eager", "formula, index_copy_", refuses_nothing, eager_rope_into_cache))
