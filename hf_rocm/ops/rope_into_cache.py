"""rope_into_cache: the steps between a layer's projections and its attention, in one operation.

It normalises queries and keys if the layer does, rotates them, and writes keys and values into a cache: the first ones
to its first rows, and later ones at a position that is stored on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, compiler

from hf_rocm import options
from hf_rocm.device import Device
from hf_rocm.errors import OptionError
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.pointwise import angles, eager_rms_norm, eager_rope, torch_rms_norm, torch_rope
from hf_rocm.ops.probe_cases import LENGTH, Draw
from hf_rocm.ops.registry import Case, Implementation, Operation, chosen_elsewhere, kernel_serves, refuses_nothing
from hf_rocm.ops.specs.pointwise import Norm, RopeIntoCacheSpec
from hf_rocm.ops.triton import detect as triton_detect
from hf_rocm.ops.triton import rope as triton
from hf_rocm.options import Switch


def rope_into_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    keys: Tensor,
    values: Tensor,
    position: Tensor | None,
    interleaved: bool = False,
    once: bool = False,
    norms: tuple[Norm, Norm] | None = None,
) -> Tensor:
    """`rope`, then keys[:, :, p] = key and values[:, :, p] = value, without reading p on the host.

    query: [B, H, S, D]; key: [B, Hkv, S, D]; value: [B, Hkv, S, D_v]; cos, sin: see `rope`. keys: [B, Hkv, L, D];
    values: [B, Hkv, L, D_v]; both are written to, and their last stride must be 1. position: int64, either [S], the row
    of each token, or a scalar, the number of tokens so far, to which S is added; None: token i is written to row i.
    once: cos and sin are [B | 1, S, R / 2], with each angle once. norms: the RMS norms of queries and keys over the
    head dim, applied before the rotation; both multiply by (1 + w) or neither does, and their weights have one dtype.

    Returns the rotated query, with the shape of query. A token whose row is outside the cache isn't written: the Triton
    tier sets its query to NaN, and the other tiers raise like `index_copy_`. Raises `OptionError` if the norms differ
    in kind.
    """
    if norms is not None and not alike(norms):
        raise OptionError(
            "rope_into_cache requires norms of the same kind", facts={"found": f"{norms[0]} and {norms[1]}"}
        )
    spec = _specification(query, key, value, cos, position, interleaved, once, norms)
    serve = _operation.traced(spec) if compiling() or compiler._is_compiling_flag else _operation.calls[spec]
    first, second = (NO_NORM, NO_NORM) if norms is None else norms
    flags = interleaved, once, first[2], first[1], second[1]
    out: Tensor = serve(query, key, value, cos, sin, keys, values, position, first[0], second[0], *flags)[0]
    return out


NO_NORM = (None, 0.0, False)


def alike(norms: tuple[Norm, Norm]) -> bool:
    """Return whether one call supports these norms of queries and keys."""
    first, second = norms
    return first.one_plus is second.one_plus and first.weight.dtype == second.weight.dtype


def one_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    position: Tensor | None,
    *,
    interleaved: bool = False,
    once: bool = False,
    norms: tuple[Norm, Norm] | None = None,
) -> bool:
    """Whether one kernel computes `rope_into_cache`. If so, this is faster than separate operations."""
    return kernel_serves(_operation, _specification(query, key, value, cos, position, interleaved, once, norms))


def _specification(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    position: Tensor | None,
    interleaved: bool,
    once: bool,
    norms: tuple[Norm, Norm] | None,
) -> tuple[object, ...]:
    norm_dtype, one_plus, grad = norms_of(norms, query, key, value)
    dtype, angle_dtype, device = query.dtype, cos.dtype, query.device
    batch, _, length, head_dim = query.shape
    tables, _, rotated = cos.shape
    if once:
        rotated *= 2
    value_dim = value.shape[-1]
    shared, one = tables == 1, batch * length == 1
    counted = None if position is None else position.ndim == 0
    return (
        dtype,
        angle_dtype,
        device,
        head_dim,
        value_dim,
        rotated,
        interleaved,
        shared,
        counted,
        one,
        once,
        norm_dtype,
        one_plus,
        grad,
    )


def norms_of(norms: tuple[Norm, Norm] | None, *tensors: Tensor) -> tuple[torch.dtype | None, bool, bool]:
    """The dtype of the norms' weights, whether they multiply by (1 + w), and whether a gradient is required.

    tensors: the call's tensors that may require a gradient, besides the weights.
    """
    weights = () if norms is None else tuple(norm.weight for norm in norms)
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors, *weights))
    return (None, False, grad) if norms is None else (norms[0].weight.dtype, norms[0].one_plus, grad)


def rotate_and_write(
    normalise: Callable[..., Tensor], rotate: Callable[..., tuple[Tensor, Tensor]]
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return a function that applies this norm and rotation, then writes keys and values to the caches.

    It writes as transformers' static cache does, and returns the rotated query and the caches.
    """

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
        if query_norm is not None and key_norm is not None:
            query = normalise(query, query_norm, query_eps, one_plus)
            key = normalise(key, key_norm, key_eps, one_plus)
        if once:
            cos, sin = (_repeat_angles(angle, interleaved) for angle in (cos, sin))
        query, key = rotate(query, key, cos, sin, interleaved)
        if position is None:
            places = torch.arange(key.shape[2], device=key.device)
        elif position.ndim == 0:
            places = torch.arange(key.shape[2], device=position.device) + position
            position.add_(key.shape[2])
        else:
            places = position
        return query, keys.index_copy_(2, places, key), values.index_copy_(2, places, value)

    return rope_into_cache


def _repeat_angles(angle: Tensor, interleaved: bool) -> Tensor:
    return angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)


def _triton_refuses(spec: RopeIntoCacheSpec, device: Device) -> str | None:
    return triton.refuses(spec, device) or parts_refuse("rope", *(() if spec.norm_dtype is None else ("rms_norm",)))


def parts_refuse(*names: str) -> str | None:
    """Why one kernel must not replace these operations, or None: the user may have chosen how one of them runs."""
    current = options.current()
    for name in names:
        if current.aiter.get(name) is Switch.REQUIRED and current.tier(name) is None:
            return f"aiter was required for {name}"
    return chosen_elsewhere(names)


def _cases(spec: RopeIntoCacheSpec) -> Iterator[Case]:
    """Yield a call that writes to the caches from row 3 on, or from row 0. All other rows must stay unchanged."""
    b, s = (1, 1) if spec.one else (2, LENGTH)
    draw = Draw(spec.dtype, spec.device)
    heads = (draw(b, s, h, d).transpose(1, 2) for h, d in ((4, spec.head_dim), (2, spec.head_dim), (2, spec.value_dim)))
    position = None
    if spec.counted is not None:
        position = 3 + (torch.zeros((), dtype=torch.int64) if spec.counted else torch.arange(s)).to(spec.device)
    tables = [*angles(spec, draw, b, s)]
    if spec.once:
        tables = [table[..., ::2] if spec.interleaved else table[..., : spec.rotated // 2] for table in tables]
    weights = (None, None) if spec.norm_dtype is None else (draw(spec.head_dim), draw(spec.head_dim))
    yield Case(
        (
            *heads,
            *tables,
            draw(b, 2, LENGTH + 5, spec.head_dim),
            draw(b, 2, LENGTH + 5, spec.value_dim),
            position,
            *(weight if weight is None else weight.to(spec.norm_dtype) for weight in weights),
        ),
        (spec.interleaved, spec.once, spec.one_plus, 1e-6, 1e-5),
    )


_operation = Operation("rope_into_cache", RopeIntoCacheSpec, _cases, family="rope", recorded=(0, 1, 5))
_operation.register(
    Implementation(
        "triton",
        "rope_kernel",
        _triton_refuses,
        triton.rope_into_cache,
        triton_detect.checked("rope_into_cache", "rope_kernel"),
    )
)
_operation.register(
    Implementation("torch", "rope, index_copy_", refuses_nothing, rotate_and_write(torch_rms_norm, torch_rope))
)
_operation.register(
    Implementation("eager", "formula, index_copy_", refuses_nothing, rotate_and_write(eager_rms_norm, eager_rope))
)
