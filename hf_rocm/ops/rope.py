"""rope: rotary position embedding of queries and keys, half-rotate or interleaved, over all or part of the head dim."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_rocm.ops.aiter import rope as aiter
from hf_rocm.ops.aiter.detect import checked
from hf_rocm.ops.registry import Implementation, Operation, refuses_nothing, route
from hf_rocm.ops.triton import detect as triton_detect
from hf_rocm.ops.triton import rope as triton


class RopeSpec(NamedTuple):
    """What the choice of an implementation depends on."""

    dtype: torch.dtype
    angle_dtype: torch.dtype
    device: torch.device
    head_dim: int
    rotated: int
    interleaved: bool
    shared: bool  # one table of angles for the whole batch
    grad: bool


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate the first R of D dims of every head by its position's angles; the others pass through.

    query: [B, H, S, D]; key: [B, Hkv, S, D]; cos, sin: [B | 1, S, R], each angle twice: in both halves, or
    (interleaved) side by side. Pairs are (i, i + R/2), or (2i, 2i + 1) when interleaved. Su et al. 2021, eq. 34.
    Returns new tensors like query and key.
    """
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    spec = (
        query.dtype,
        cos.dtype,
        query.device,
        query.shape[-1],
        cos.shape[-1],
        interleaved,
        cos.shape[0] == 1,
        grad,
    )
    result: tuple[Tensor, Tensor] = route(_operation, spec, query, key)(query, key, cos, sin, interleaved)
    return result


def torch_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """In the dtype of the tensors, as the unfused layers compute it."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotated(query, cos, sin, interleaved), _rotated(key, cos, sin, interleaved)


def eager_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The oracle: in at least fp32, rounded once at the end."""
    wide = torch.promote_types(query.dtype, torch.float32)
    outputs = torch_rope(query.to(wide), key.to(wide), cos.to(wide), sin.to(wide), interleaved)
    return outputs[0].to(query.dtype), outputs[1].to(key.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    r = cos.shape[-1]
    if r < x.shape[-1]:
        return torch.cat((_rotated(x[..., :r], cos, sin, interleaved), x[..., r:]), dim=-1)
    if interleaved:
        even, odd = x[..., ::2], x[..., 1::2]
        crossed = torch.stack((-odd, even), dim=-1).flatten(-2)
    else:
        crossed = torch.cat((-x[..., r // 2 :], x[..., : r // 2]), dim=-1)
    return x * cos + crossed * sin


_operation = Operation("rope", RopeSpec)
_operation.register(
    Implementation("aiter", "rope_cached_2c", aiter.refuses, aiter.rope, checked("rope", "rope_cached_2c"))
)
_operation.register(
    Implementation("triton", "rope_kernel", triton.refuses, triton.rope, triton_detect.checked("rope", "rope_kernel"))
)
_operation.register(Implementation("torch", "two products", refuses_nothing, torch_rope))
_operation.register(Implementation("eager", "formula", refuses_nothing, eager_rope))
