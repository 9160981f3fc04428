"""Attention of a few queries over many keys, as in decoding, through hf_rocm's split-KV kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm import options
from hf_rocm.device import describe
from hf_rocm.errors import OptionError
from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.fakes import attended
from hf_rocm.ops.triton import detect
from hf_rocm.ops.triton.launch import cached, dense, form, forms_of, forms_of_strides, launch, power_of_two, units
from hf_rocm.ops.triton.norm import DTYPES
from hf_rocm.ops.triton.rope import Norms
from hf_rocm.ops.triton.tiles import GATHERED_COLUMNS, plan

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hf_rocm.device import Device
    from hf_rocm.ops.specs.attention import (
        AttendIntoCacheSpec,
        AttentionSpec,
        AttentionTerms,
        DecodeSpec,
        DecodeTerms,
        PagedSpec,
        PagedTerms,
    )

LARGEST_HEAD = 256


def refuses(spec: DecodeSpec | PagedSpec | AttendIntoCacheSpec, device: Device) -> str | None:
    """Why the kernel can't serve this call, or None."""
    reason = detect.unavailable(device)
    if reason is not None:
        return reason
    if not spec.few_queries:
        return "the decode kernel takes at most 16 queries for each row"
    return limits(spec, device)


def attention_refuses(spec: AttentionSpec, device: Device) -> str | None:
    """Why the kernel can't serve this call to `attention`, or None."""
    reason = detect.unavailable(device)
    if reason is not None:
        return reason
    if spec.weights:
        return "the decode kernel doesn't return attention weights"
    if not (spec.one_query or spec.few_queries):
        return "the decode kernel takes at most 16 queries, and several only if there are more keys than queries"
    return limits(spec, device) or _gain(spec, device)


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    **terms: Unpack[DecodeTerms],
) -> Tensor:
    """See `hf_rocm.ops.decode_attention`."""
    starts, sinks, scale, softcap = terms["starts"], terms["sinks"], terms["scale"], terms["softcap"]
    window = terms["window"]
    result: Tensor = _traced(query, key, value, lengths, starts, None, sinks, None, scale, softcap, window, True)
    return result


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    **terms: Unpack[PagedTerms],
) -> Tensor:
    """See `hf_rocm.ops.paged_attention`."""
    lengths = lengths.contiguous()
    key_pages, value_pages = key_pages.transpose(1, 2), value_pages.transpose(1, 2)
    if key is not None and value is not None:
        _traced_write(key_pages, value_pages, key, value, table, lengths, terms["slots"])
    scale, softcap, sinks = terms["scale"], terms["softcap"], terms["sinks"]
    result: Tensor = _traced(
        *(query, key_pages, value_pages, lengths, None, None, sinks, table, scale, softcap, terms["window"], True)
    )
    return result


def attention(query: Tensor, key: Tensor, value: Tensor, **terms: Unpack[AttentionTerms]) -> tuple[Tensor, None]:
    """See `hf_rocm.ops.attention`."""
    mask, sinks, scale, softcap = terms["mask"], terms["sinks"], terms["scale"], terms["softcap"]
    window, causal = terms["window"], terms["causal"]
    return _traced(query, key, value, None, None, mask, sinks, None, scale, softcap, window, causal), None


def limits(spec: DecodeSpec | AttentionSpec | PagedSpec | AttendIntoCacheSpec, device: Device) -> str | None:
    """Why the kernel doesn't support the gradient, dtype or head dims of a call, or None."""
    if spec.grad:
        return "the decode kernel has no gradient"
    if spec.dtype not in DTYPES:
        return f"the decode kernel supports fp32, bf16 and fp16, not {spec.dtype}"
    if spec.dtype == torch.float32 and device.kind == "cuda":
        # Measured on an H200.
        return "a GPU's exponential function is less accurate than fp32 requires"
    if max(spec.head_dim, spec.value_dim) > LARGEST_HEAD:
        return f"head dims must be at most {LARGEST_HEAD}, got {spec.head_dim} and {spec.value_dim}"
    if (device.arch or "").startswith("gfx11") and max(spec.head_dim, spec.value_dim) > 128:
        return f"on {device.arch} the decode kernel would spill registers for head dims above 128"
    return None


def _gain(spec: AttentionSpec, device: Device) -> str | None:
    """Why PyTorch's own kernel is preferred. None if it is not, or if the triton tier was requested."""
    restricted = spec.mask is not None or spec.window is not None or spec.softcap or spec.sinks
    if device.kind == "cpu" or device.rocm or not spec.one_query or restricted:
        return None
    if options.current().tier("attention") == "triton":
        return None
    return "on NVIDIA GPUs, PyTorch's kernel also splits the keys for a single query without a mask or window"


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None,
    starts: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    table: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    causal: bool,
    new: NewKeys | None = None,
) -> Tensor:
    """Launch the kernels. Returns [B, S_q, H, D_v].

    mask: see `attention`. table: see `paged_attention`. new: for `attend_into_cache`.
    """
    from hf_rocm.ops.triton.kernels.decode import decode_kernel
    from hf_rocm.ops.triton.kernels.gather import gather_kernel

    # The launch does not distinguish integers from other numbers.
    softcap = None if softcap is None else float(softcap)
    b, heads, queries, dim = query.shape
    _, kv_heads, keys, value_dim = value.shape
    page = None
    if table is not None:
        page, keys = keys, keys * table.shape[1]
    output = query.new_empty((b, queries, heads, value_dim))
    if not output.numel():
        return output
    query, key, value = dense(query), dense(key), dense(value)
    if starts is not None:
        starts = starts.contiguous()
    causal = causal and queries > 1
    sizes = (b, heads, kv_heads, queries, keys, dim, value_dim)
    rotation = _NO_ROTATION if new is None else new.rotation
    restricted = None if mask is None else mask.dtype, window is None
    work = _work(sizes, query.dtype, query.device, *restricted, causal, page, rotation)
    parts = output
    if work.workspace:
        parts = torch.empty(work.workspace, dtype=torch.float32, device=query.device)
    further = (lengths, starts, mask, None if work.workspace else sinks, table)
    tensors, epsilons, new_strides = _ABSENT if new is None else new.arguments
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3])
    mask_strides = (None,) * 4 if mask is None else _strides_of_mask(mask, keys)
    length_b = 0 if lengths is None or (lengths.numel() == 1 and table is None) else lengths.stride(0)
    table_b = None if table is None else table.stride(0)
    places = (keys, queries, window, *strides, *mask_strides, length_b, table_b, *new_strides)
    launch(
        decode_kernel,
        work.grid,
        (query, key, value, parts, *further, *tensors, float(scale), softcap, *epsilons, *places),
        work.constants,
        num_warps=work.warps,
        num_stages=work.stages,
        # With new keys, products are rounded before they are added, as in `rope_kernel`.
        contract=new is None,
        forms=(
            forms_of(query, key, value, parts, *further),
            new is not None and tuple(map(form, (*tensors, *new_strides))),
            softcap is None,
            queries,
            form(window),
            forms_of_strides(strides),
            mask is not None and tuple(map(form, mask_strides)),
            length_b,
            form(table_b),
        ),
    )
    if work.workspace:
        launch(
            gather_kernel,
            work.gather_grid,
            (parts, sinks, output, heads, work.grid[0]),
            work.gather_constants,
            num_warps=1,
        )
    return output


class NewKeys(NamedTuple):
    """The keys and values of new tokens, which the kernel writes to the cache, with their angles, rows and norms."""

    key: Tensor
    value: Tensor
    cos: Tensor
    sin: Tensor
    place: Tensor
    norms: Norms
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
        strides = (*key.stride()[:3], *value.stride()[:3], 0 if cos.shape[0] == 1 else cos.stride(0))
        return (
            (key, value, cos, sin, self.place.contiguous(), *weights),
            (float(self.norms.query_eps), float(self.norms.key_eps)),
            strides,
        )


_NO_ROTATION = None, False, False
_ABSENT = (None,) * 7, (None,) * 2, (None,) * 7


class _Work(NamedTuple):
    """The launch arguments that are cached for all calls with the same sizes and options.

    workspace: the number of fp32 elements in the partial results of all programs; 0 if there is one split.
    """

    grid: tuple[int, int, int]
    constants: dict[str, Any]
    warps: int
    stages: int
    workspace: int
    gather_grid: tuple[int, int]
    gather_constants: dict[str, Any]


@cached
def _work(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    mask: torch.dtype | None,
    endless: bool,
    causal: bool,
    page: int | None,
    rotation: tuple[int | None, bool, bool],
) -> _Work:
    """The launch arguments for these sizes.

    sizes: B, H, Hkv, S_q, S, D and D_v. endless: whether there is no window. rotation: `NewKeys.rotation`, or None,
    False and False.
    """
    b, heads, kv_heads, queries, keys, dim, value_dim = sizes
    group, rows = heads // kv_heads, b * queries * heads
    division = plan(
        b,
        kv_heads,
        group * queries,
        keys,
        max(dim, value_dim),
        dtype.itemsize,
        units(device),
        describe(device).arch,
        plain=mask is None and endless,
    )
    alone = division.splits == 1
    wide = max(16, power_of_two(value_dim))
    columns = min(GATHERED_COLUMNS, wide)
    return _Work(
        grid=(division.splits, kv_heads * division.pieces, b),
        constants={
            "HEADS": heads,
            "GROUP": group,
            "DIM": dim,
            "VALUE_DIM": value_dim,
            "ALONE": alone,
            "CAUSAL": causal,
            "PAGE": page,
            "HIDDEN": None if mask is None or mask == torch.bool else torch.finfo(mask).min / 2,
            "PRECISION": "ieee" if dtype == torch.float32 else None,
            "ROTATED": rotation[0],
            "ONE_PLUS": rotation[1],
            "ONCE": rotation[2],
            "ROWS": division.rows,
            "BLOCK": division.keys,
            "BLOCK_D": max(16, power_of_two(dim)),
            "BLOCK_V": wide,
        },
        warps=division.warps,
        stages=division.stages,
        workspace=0 if alone else rows * division.splits * (value_dim + 2),
        gather_grid=(rows, -(-value_dim // columns)),
        gather_constants={"VALUE_DIM": value_dim, "BLOCK": power_of_two(division.splits), "BLOCK_V": columns},
    )


def _strides_of_mask(mask: Tensor, keys: int) -> tuple[int, ...]:
    """The strides of a mask: 0 in the dims of size 1, which apply to all rows, heads, queries or keys.

    Raises `OptionError` if the mask has more than one key, but fewer than `keys`.
    """
    if 1 < mask.shape[3] < keys:
        raise OptionError(f"a mask of {mask.shape[3]} keys can't be used for {keys} keys")
    return tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))


_traced = opaque(
    "triton_decode(Tensor query, Tensor key, Tensor value, Tensor? lengths, Tensor? starts, Tensor? mask, "
    "Tensor? sinks, Tensor? table, float scale, float? softcap, int? window, bool causal) -> Tensor",
    forward,
    attended,
)


def _write(
    key_pages: Tensor,
    value_pages: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    lengths: Tensor,
    slots: Tensor | None,
) -> None:
    """Write new keys and values [B, Hkv, S_q, D] into pages [P, Hkv, PAGE, D]."""
    from hf_rocm.ops.triton.kernels.pages import page_kernel

    b, kv_heads, queries, dim = key.shape
    value_dim, page = value.shape[3], key_pages.shape[2]
    if not key.numel():
        return
    key, value = dense(key), dense(value)
    strides = (stride for part in (key, value, key_pages, value_pages) for stride in part.stride()[:3])
    launch(
        page_kernel,
        (b * queries, kv_heads),
        (
            *(key, value, key_pages, value_pages, table, lengths, slots, queries, *strides, table.stride(0)),
            None if slots is None else slots.stride(0),
        ),
        {
            "DIM": dim,
            "VALUE_DIM": value_dim,
            "PAGE": page,
            "BLOCK_D": power_of_two(dim),
            "BLOCK_V": power_of_two(value_dim),
        },
        num_warps=1,
    )


def _nothing(*_: object) -> None:
    return None


_traced_write = opaque(
    "triton_write_pages(Tensor(a!) key_pages, Tensor(b!) value_pages, Tensor key, Tensor value, Tensor table, "
    "Tensor lengths, Tensor? slots) -> ()",
    _write,
    _nothing,
)
