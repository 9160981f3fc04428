"""A few queries against many keys through our split-KV kernel: decoding, and any call that looks like it."""

from __future__ import annotations

from functools import cache, lru_cache, reduce
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm import options
from hf_rocm.device import describe
from hf_rocm.ops.opaque import opaque
from hf_rocm.ops.triton import detect
from hf_rocm.ops.triton.launch import form, launch, power_of_two

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.attention import AttentionSpec
    from hf_rocm.ops.decode import DecodeSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
MOST_SPLITS = 128
LONG = 64  # blocks of keys


def refuses(spec: DecodeSpec, device: Device) -> str | None:
    """Why the kernel can't serve this call of `decode_attention`, or None."""
    reason = detect.unavailable(device)
    if reason is not None:
        return reason
    if not spec.few_queries:
        return "our decode kernel is for at most 16 queries a row"
    return _limits(spec, device)


def attention_refuses(spec: AttentionSpec, device: Device) -> str | None:
    """Why the kernel can't serve this call of `attention`, or None."""
    reason = detect.unavailable(device)
    if reason is not None:
        return reason
    if spec.weights:
        return "our decode kernel doesn't return attention weights"
    if not (spec.one_query or spec.few_queries):
        return "our decode kernel is for at most 16 queries on more keys"
    return _limits(spec, device) or _gain(spec, device)


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    starts: Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    ends: Tensor | None,
) -> Tensor:
    """See `hf_rocm.ops.decode_attention`."""
    result: Tensor = _traced(query, key, value, lengths, starts, None, sinks, scale, softcap, window, True)
    return result


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool,
    mask: Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, None]:
    """See `hf_rocm.ops.attention`."""
    return _traced(query, key, value, None, None, mask, sinks, scale, softcap, window, causal), None


class Plan(NamedTuple):
    """How the work is dealt out. rows, keys: of a block; pieces: blocks of rows; splits: programs for each piece."""

    rows: int
    keys: int
    pieces: int
    splits: int
    warps: int
    stages: int


def plan(
    b: int,
    kv_heads: int,
    rows: int,
    keys: int,
    dim: int,
    size: int,
    units: int,
    arch: str | None,
    *,
    plain: bool = True,
) -> Plan:
    """For B · Hkv pieces of `rows` queries each, against a cache of `keys` keys.

    dim: the larger head dim; size: bytes of an element; units: compute units of the GPU; arch: its gfx name, or None;
    plain: neither a mask nor a window.
    Depends on nothing that changes from step to step, so that a recorded graph stays valid. Blocks and stages are the
    fastest of those measured on an NVIDIA GPU; AMD's are what keeps its compiler from spilling registers.
    """
    block_rows = 32 if rows > 16 and plain and dim <= 128 else 16
    pieces = -(-rows // block_rows)
    radeon = arch is not None and not arch.startswith("gfx9")
    block = max(16, min(64, (8192 if radeon else 16384) // (power_of_two(dim) * size)))
    room = units if arch is None else 2 * units  # of AMD's it is a guess: less is under way in each of their programs
    splits = _splits(b * kv_heads * pieces, -(-keys // block), room)
    return Plan(block_rows, block, pieces, splits, 8 if radeon else 4, 3 if arch is None else 2)


def _splits(pieces: int, blocks: int, room: int) -> int:
    """Into how many programs each piece of `blocks` blocks is split.

    room: programs that keep the GPU busy. Long pieces are halved even so, for the sake of the last ones to end.
    """
    least = 2 if blocks >= LONG else 1
    return max(1, min(max(room // pieces, least), blocks, MOST_SPLITS))


def _limits(spec: DecodeSpec | AttentionSpec, device: Device) -> str | None:
    if spec.grad:
        return "our decode kernel has no gradient"
    if spec.dtype not in DTYPES:
        return f"our decode kernel is for fp32, bf16 and fp16, not for {spec.dtype}"
    if spec.dtype == torch.float32 and device.kind == "cuda":
        return "a GPU's exponentials are not as exact as fp32 asks for"  # the H200's were not
    if max(spec.head_dim, spec.value_dim) > LARGEST_HEAD:
        return f"head dims may be at most {LARGEST_HEAD}, got {spec.head_dim} and {spec.value_dim}"
    if (device.arch or "").startswith("gfx11") and max(spec.head_dim, spec.value_dim) > 128:
        return f"on {device.arch} our decode kernel would spill registers for head dims above 128"
    return None


def _gain(spec: AttentionSpec, device: Device) -> str | None:
    """Why PyTorch's own kernel comes first, unless our tier was named."""
    restricted = spec.mask is not None or spec.window is not None or spec.softcap or spec.sinks
    if device.kind == "cpu" or device.rocm or not spec.one_query or restricted:
        return None
    if options.current().tier("attention") == "triton":
        return None
    return "on NVIDIA's GPUs PyTorch's own kernel splits the keys too, if nothing restricts a single query"


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None,
    starts: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    causal: bool,
) -> Tensor:
    from hf_rocm.ops.triton.kernels.decode import decode_kernel, gather_kernel

    b, heads, queries, dim = query.shape
    _, kv_heads, keys, value_dim = value.shape
    output = query.new_empty((b, queries, heads, value_dim))
    if not output.numel():
        return output
    query, key, value = _unit(query), _unit(key), _unit(value)
    if starts is not None:
        starts = starts.contiguous()
    causal = causal and queries > 1
    sizes = (b, heads, kv_heads, queries, keys, dim, value_dim)
    work = _work(sizes, query.dtype, query.device, None if mask is None else mask.dtype, window is None, causal)
    parts = output
    if work.room:
        parts = torch.empty(work.room, dtype=torch.float32, device=query.device)
    further = (lengths, starts, mask, None if work.room else sinks)
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3])
    mask_strides = (None,) * 4 if mask is None else _strides_of_mask(mask)
    length_b = 0 if lengths is None or lengths.numel() == 1 else lengths.stride(0)
    launch(
        decode_kernel,
        work.grid,
        (query, key, value, parts, *further, scale, softcap, keys, queries, window, *strides, *mask_strides, length_b),
        work.constants,
        num_warps=work.warps,
        num_stages=work.stages,
        forms=(
            form(query),
            form(key),
            form(value),
            form(parts),
            *[each is not None and form(each) for each in further],
            softcap is None,
            queries,
            form(window),
            _form_of(strides),
            mask is not None and tuple(map(form, mask_strides)),
            length_b,
        ),
    )
    if work.room:
        launch(
            gather_kernel,
            work.gather_grid,
            (parts, sinks, output, heads, work.grid[0]),
            work.gather_constants,
            num_warps=4,
        )
    return output


class _Work(NamedTuple):
    """What both launches have in common from call to call. room: fp32 numbers of the partial results, 0 without any."""

    grid: tuple[int, int, int]
    constants: dict[str, Any]
    warps: int
    stages: int
    room: int
    gather_grid: tuple[int, int]
    gather_constants: dict[str, Any]


@lru_cache(maxsize=4096)
def _work(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    mask: torch.dtype | None,
    endless: bool,
    causal: bool,
) -> _Work:
    """For B, H, Hkv, S_q, S, D and D_v. endless: without a window."""
    b, heads, kv_heads, queries, keys, dim, value_dim = sizes
    group, rows = heads // kv_heads, b * queries * heads
    how = plan(
        b,
        kv_heads,
        group * queries,
        keys,
        max(dim, value_dim),
        dtype.itemsize,
        _units(device),
        describe(device).arch,
        plain=mask is None and endless,
    )
    alone = how.splits == 1
    wide = max(16, power_of_two(value_dim))
    columns = min(64, wide)
    return _Work(
        grid=(how.splits, kv_heads * how.pieces, b),
        constants={
            "HEADS": heads,
            "GROUP": group,
            "DIM": dim,
            "VALUE_DIM": value_dim,
            "ALONE": alone,
            "CAUSAL": causal,
            "HIDDEN": None if mask is None or mask == torch.bool else torch.finfo(mask).min / 2,
            "PRECISION": "ieee" if dtype == torch.float32 else None,
            "ROWS": how.rows,
            "BLOCK": how.keys,
            "BLOCK_D": max(16, power_of_two(dim)),
            "BLOCK_V": wide,
        },
        warps=how.warps,
        stages=how.stages,
        room=0 if alone else rows * how.splits * (value_dim + 2),
        gather_grid=(rows, -(-value_dim // columns)),
        gather_constants={"VALUE_DIM": value_dim, "BLOCK": power_of_two(how.splits), "BLOCK_V": columns},
    )


def _strides_of_mask(mask: Tensor) -> tuple[int, ...]:
    """0 along what all rows, heads or queries share."""
    *outer, last = zip(mask.shape, mask.stride(), strict=True)
    return (*(0 if size == 1 else stride for size, stride in outer), last[1])


def _form_of(strides: tuple[int, ...]) -> Any:
    """The same as the forms of all of them, in the usual case as one."""
    union = reduce(or_, strides)
    return (union % 16 == 0 and 0 <= union < 2**31) or tuple(map(form, strides))


def _shape(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))


def _unit(x: Tensor) -> Tensor:
    """With columns next to each other, as every cache and projection has them."""
    return x if x.stride(3) == 1 else x.contiguous()


@cache
def _units(device: torch.device) -> int:
    """Compute units of a GPU; a few for the CPU, which only interprets."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


_traced = opaque(
    "triton_decode(Tensor query, Tensor key, Tensor value, Tensor? lengths, Tensor? starts, Tensor? mask, "
    "Tensor? sinks, float scale, float? softcap, int? window, bool causal) -> Tensor",
    _forward,
    _shape,
)
