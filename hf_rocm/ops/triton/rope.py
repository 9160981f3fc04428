"""RoPE through hf_rocm's kernel: queries and keys in one launch, which may also write keys and values into a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.triton import detect
from hf_rocm.ops.triton.launch import cached, dense, forms_of, launch, power_of_two, warps
from hf_rocm.ops.triton.norm import DTYPES

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.specs.attention import AttendIntoCacheSpec
    from hf_rocm.ops.specs.pointwise import RopeIntoCacheSpec, RopeSpec

WIDEST = 1024


class Norms(NamedTuple):
    """The norms of queries and keys over the head dim, before the rotation: either both are given, or neither."""

    query: Tensor | None = None
    key: Tensor | None = None
    query_eps: float = 0.0
    key_eps: float = 0.0
    one_plus: bool = False


NO_NORMS = Norms()


def refuses(spec: RopeSpec | RopeIntoCacheSpec | AttendIntoCacheSpec, device: Device) -> str | None:
    """Why the kernel can't rotate and normalise these heads, or None."""
    if spec.grad:
        return "the RoPE kernel has no gradient"
    if spec.dtype not in DTYPES:
        return f"the RoPE kernel supports fp32, bf16 and fp16, not {spec.dtype}"
    if spec.angle_dtype != spec.dtype:
        return f"the RoPE kernel needs one dtype, got {spec.dtype} and angles of {spec.angle_dtype}"
    if spec.rotated % 2 or spec.rotated > spec.head_dim:
        return f"the RoPE kernel rotates pairs of dims within a head, got {spec.rotated} of {spec.head_dim} dims"
    norm_dtype, one_plus = getattr(spec, "norm_dtype", None), getattr(spec, "one_plus", False)
    if norm_dtype is not None and (norm_dtype not in DTYPES or (norm_dtype != spec.dtype and not one_plus)):
        return f"the RoPE kernel needs one dtype, got {spec.dtype} and a norm's weight of {norm_dtype}"
    if spec.head_dim > WIDEST:
        return f"the RoPE kernel takes heads of at most {WIDEST} dims, got {spec.head_dim}"
    return detect.unavailable(device)


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """See `hf_rocm.ops.rope`."""
    result: tuple[Tensor, Tensor] = _traced(query, key, cos, sin, interleaved)
    return result


def rope_into_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    interleaved: bool,
    once: bool,
    one_plus: bool,
    query_eps: float,
    key_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `hf_rocm.ops.rope_into_cache`."""
    norms = query_norm, key_norm, query_eps, key_eps, one_plus
    out: Tensor = _traced_into_cache(query, key, value, cos, sin, keys, values, position, *norms, interleaved, once)
    return out, keys, values


def _forward(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    outputs = _like(query, key)
    if query.numel():
        _launch(query, key, None, cos, sin, outputs[0], outputs[1], None, None, interleaved)
    return outputs


def _into_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    query_eps: float,
    key_eps: float,
    one_plus: bool,
    interleaved: bool,
    once: bool,
) -> Tensor:
    out = torch.empty_like(query)
    if query.numel():
        norms = Norms(query_norm, key_norm, query_eps, key_eps, one_plus)
        advanced = _launch(
            query, key, value, cos, sin, out, keys, values, position, interleaved, norms=norms, once=once
        )
        if position is not None and position.ndim == 0 and not advanced:
            position.add_(query.shape[2])
    return out


def _launch(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    keys: Tensor,
    values: Tensor | None,
    position: Tensor | None,
    interleaved: bool,
    *,
    norms: Norms = NO_NORMS,
    once: bool = False,
) -> bool:
    """Launch the kernel. Returns whether the kernel itself advances the position, if that is a scalar."""
    from hf_rocm.ops.triton.kernels.rope import rope_kernel

    b, h, s, d = query.shape
    kv_heads = key.shape[1]
    query, key, cos, sin = dense(query), dense(key), cos.contiguous(), sin.contiguous()
    written = value is not None
    value = key if value is None else dense(value)
    alone = written and b * s == 1
    block_heads, block_kv, threads = tile(b * s, h, kv_heads, d, alone=alone)
    blocks = 1 if alone else -(-h // block_heads) + -(-kv_heads // block_kv)
    target = keys if values is None else values
    sizes = (
        s,
        keys.shape[2],
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        0 if cos.shape[0] == 1 else cos.stride(0),
        *out.stride()[:3],
        *keys.stride()[:3],
        *target.stride()[:3],
    )
    rotated, value_dim = cos.shape[-1] * (2 if once else 1), value.shape[3]
    weights = tuple(None if weight is None else weight.contiguous() for weight in norms[:2])
    further = (*weights, float(norms.query_eps), float(norms.key_eps))
    launch(
        rope_kernel,
        (b * s, blocks),
        (query, key, value if written else None, cos, sin, out, keys, values, position, *further, *sizes),
        {
            "HEADS": h,
            "KV_HEADS": kv_heads,
            "DIM": d,
            "VALUE_DIM": value_dim,
            "ROTATED": rotated,
            "INTERLEAVED": interleaved,
            "ONE_PLUS": norms.one_plus,
            "ONCE": once,
            "COUNTED": position is not None and position.ndim == 0,
            "ALONE": alone,
            "BLOCK_HEADS": block_heads,
            "BLOCK_KV": block_kv,
            "PAIRS": power_of_two(rotated // 2),
            "REST": power_of_two(max(1, d - rotated)),
            "BLOCK_VALUE": power_of_two(value_dim),
        },
        num_warps=warps(threads, query.device),
        contract=False,
        forms=(
            forms_of(query, key, value if written else None, cos, sin, out, keys, target, position, *weights),
            sizes,
        ),
    )
    return alone


@cached
def tile(tokens: int, heads: int, kv_heads: int, dim: int, *, alone: bool) -> tuple[int, int, int]:
    """(query heads, key heads, threads) of a program, all powers of two. alone: one program for all heads."""
    width = power_of_two(dim)
    if alone:
        block_heads, block_kv = power_of_two(heads), power_of_two(kv_heads)
    else:
        most = max(1, (2048 if tokens >= 64 else 512) // width)
        block_heads, block_kv = min(most, power_of_two(heads)), min(most, power_of_two(kv_heads))
    return block_heads, block_kv, min(512, max(64, block_heads * width // 8))


def _like(query: Tensor, key: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key)


def _like_query(query: Tensor, *_: object) -> Tensor:
    return torch.empty_like(query)


_traced = opaque(
    "triton_rope(Tensor query, Tensor key, Tensor cos, Tensor sin, bool interleaved) -> (Tensor, Tensor)",
    _forward,
    _like,
)
_traced_into_cache = opaque(
    "triton_rope_into_cache(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor(a!) keys, "
    "Tensor(b!) values, Tensor(c!)? position, Tensor? query_norm, Tensor? key_norm, float query_eps, float key_eps, "
    "bool one_plus, bool interleaved, bool once) -> Tensor",
    _into_cache,
    _like_query,
)
