"""attend_into_cache: the steps between a layer's input projections and its output projection, in one operation.

For one or a few tokens per row, it does what `rope_into_cache` and `decode_attention` do: norms, rotation, the write to
a static cache, and attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, compiler

from hf_rocm.device import Device
from hf_rocm.errors import OptionError
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.decode import eager_decode, torch_decode, torch_refuses
from hf_rocm.ops.pointwise import angles, eager_rms_norm, eager_rope, torch_rms_norm, torch_rope
from hf_rocm.ops.probe_cases import LENGTH, LONG, Draw, small_window
from hf_rocm.ops.registry import (
    Case,
    Implementation,
    Operation,
    kernel_serves,
    refuses_nothing,
)
from hf_rocm.ops.rope_into_cache import NO_NORM, alike, norms_of, parts_refuse, rotate_and_write
from hf_rocm.ops.specs.attention import FEW_QUERIES, AttendIntoCacheCall, AttendIntoCacheSpec, DecodeTerms
from hf_rocm.ops.specs.pointwise import Norm
from hf_rocm.ops.triton import attend_into_cache as triton
from hf_rocm.ops.triton import detect as triton_detect


def attend_into_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    *,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    scale: float,
    starts: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    once: bool = False,
    norms: tuple[Norm, Norm] | None = None,
) -> Tensor:
    """`rope_into_cache` of S tokens per row, then `decode_attention` over the cache. Kernels support S up to 16.

    query: [B, H, S, D]; key: [B, Hkv, S, D]; value: [B, Hkv, S, D_v]; cos, sin: [B | 1, S, R], or [B | 1, S, R / 2]
    with `once`; the rotation is not interleaved. keys: [B, Hkv, L, D]; values: [B, Hkv, L, D_v]; both are written to,
    and their last stride must be 1. lengths: [1] int32 or int64, the number of keys of every row, including the new
    ones. position: [S] int64, the rows of the cache for the new keys, which must be the last S of the first
    min(lengths, L) rows; for any other row, the Triton tier does not write the key, and returns NaN. The other
    arguments are those of the two operations.

    No tensor is read on the host. Returns [B, S, H, D_v]. Raises `OptionError` if the norms differ in kind.
    """
    if norms is not None and not alike(norms):
        raise OptionError(
            "attend_into_cache requires norms of the same kind", facts={"found": f"{norms[0]} and {norms[1]}"}
        )
    spec = _specification(query, key, value, cos, starts, window, softcap, sinks, once, norms)
    serve = _operation.traced(spec) if compiling() or compiler._is_compiling_flag else _operation.calls[spec]
    first, second = (NO_NORM, NO_NORM) if norms is None else norms
    tensors = query, key, value, cos, sin, lengths, keys, values, position, starts, sinks, first[0], second[0]
    call = AttendIntoCacheCall(*tensors, first[1], second[1], first[2], once, scale, softcap, window)
    out: Tensor = serve(call)[0]
    return out


def one_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    *,
    starts: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    once: bool = False,
    norms: tuple[Norm, Norm] | None = None,
) -> bool:
    """Whether one kernel computes `attend_into_cache`. Otherwise, call the two operations."""
    return kernel_serves(
        _operation, _specification(query, key, value, cos, starts, window, softcap, sinks, once, norms)
    )


def _specification(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    starts: Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    once: bool,
    norms: tuple[Norm, Norm] | None,
) -> tuple[object, ...]:
    norm_dtype, one_plus, grad = norms_of(norms, query, key, value)
    dtype, angle_dtype, device = query.dtype, cos.dtype, query.device
    heads, head_dim = query.shape[1], query.shape[3]
    kv_heads, value_dim = value.shape[1], value.shape[3]
    shared, rotated, length = cos.shape[0] == 1, cos.shape[-1], query.shape[2]
    one_query, few_queries = length == 1, length <= FEW_QUERIES
    if once:
        rotated *= 2
    return (
        dtype,
        angle_dtype,
        device,
        heads,
        kv_heads,
        head_dim,
        value_dim,
        rotated,
        shared,
        once,
        norm_dtype,
        one_plus,
        softcap is not None,
        sinks is not None,
        starts is not None,
        window,
        grad,
        one_query,
        few_queries,
    )


def _one_by_one(
    normalise: Callable[..., Tensor], rotate: Callable[..., tuple[Tensor, Tensor]], attend: Callable[..., Tensor]
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return a function that writes to the caches, computes attention over them, and also returns the caches."""
    write = rotate_and_write(normalise, rotate)

    def attend_into_cache(call: AttendIntoCacheCall) -> tuple[Tensor, Tensor, Tensor]:
        tensors = call.query, call.key, call.value, call.cos, call.sin, call.keys, call.values, call.position
        norms = call.query_norm, call.key_norm, False, call.once, call.one_plus, call.query_eps, call.key_eps
        query, keys, values = write(*tensors, *norms)
        terms = DecodeTerms(
            scale=call.scale,
            starts=call.starts,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
            ends=None,
        )
        return attend(query, keys, values, call.lengths, **terms), keys, values

    return attend_into_cache


def _triton_refuses(spec: AttendIntoCacheSpec, device: Device) -> str | None:
    parts = ("rope", "rope_into_cache", "decode_attention", *(() if spec.norm_dtype is None else ("rms_norm",)))
    return triton.refuses(spec, device) or parts_refuse(*parts)


def _cases(spec: AttendIntoCacheSpec) -> Iterator[Case]:
    """Few and many keys. Values of padding and of unwritten rows are large, but not so large that they hide errors."""
    draw = Draw(spec.dtype, spec.device)
    weights: tuple[Tensor | None, Tensor | None] = (None, None)
    if spec.norm_dtype is not None:
        weights = draw(spec.head_dim).to(spec.norm_dtype), draw(spec.head_dim).to(spec.norm_dtype)
    fewest, most = (1, 1) if spec.one_query else (5, FEW_QUERIES) if spec.few_queries else (LENGTH, LENGTH)
    for s, length in ((fewest, fewest), (fewest, LENGTH), (most, LONG - 1)):
        query = draw(2, s, spec.heads, spec.head_dim).transpose(1, 2)
        key = draw(2, s, spec.kv_heads, spec.head_dim).transpose(1, 2)
        value = draw(2, s, spec.kv_heads, spec.value_dim).transpose(1, 2)
        tables = angles(spec, draw, 2, s)
        if spec.once:
            tables = tables[0][..., : spec.rotated // 2], tables[1][..., : spec.rotated // 2]
        keys = draw(2, spec.kv_heads, LONG, spec.head_dim)
        values = draw(2, spec.kv_heads, LONG, spec.value_dim)
        values[:, :, length - s :] = 30.0
        starts = None
        if spec.starts:
            starts = torch.tensor([0, max(0, length - s - 8)], dtype=torch.int32, device=spec.device)
            values[1, :, : max(0, length - s - 8)] = 30.0
        yield Case(
            (
                query,
                key,
                value,
                *tables,
                torch.tensor([length], device=spec.device),
                keys,
                values,
                torch.arange(length - s, length, device=spec.device),
                starts,
                draw(spec.heads) if spec.sinks else None,
                *weights,
            ),
            (
                1e-6,
                1e-5,
                spec.one_plus,
                spec.once,
                spec.head_dim**-0.5,
                2.0 if spec.softcap else None,
                spec.window,
            ),
        )


_operation = Operation(
    "attend_into_cache",
    AttendIntoCacheSpec,
    _cases,
    small_window,
    family="attention",
    terms=AttendIntoCacheCall,
    recorded=(0, 1, 6),
)
_operation.register(
    Implementation(
        "triton",
        "decode_kernel, new keys",
        _triton_refuses,
        triton.attend_into_cache,
        triton_detect.checked("attend_into_cache", "decode_kernel, new keys"),
    )
)
_operation.register(
    Implementation(
        "torch",
        "rope, index_copy_, SDPA",
        torch_refuses,
        _one_by_one(torch_rms_norm, torch_rope, torch_decode),
    )
)
_operation.register(
    Implementation(
        "eager",
        "formula, index_copy_, softmax",
        refuses_nothing,
        _one_by_one(eager_rms_norm, eager_rope, eager_decode),
    )
)
