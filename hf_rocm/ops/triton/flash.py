"""Attention for many queries (prefill), dense or packed, through hf_rocm's one-pass kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_rocm import options
from hf_rocm.device import describe
from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.fakes import attended
from hf_rocm.ops.triton import detect
from hf_rocm.ops.triton.decode import LARGEST_HEAD
from hf_rocm.ops.triton.launch import dense, form, forms_of, forms_of_strides, launch, power_of_two
from hf_rocm.ops.triton.norm import DTYPES
from hf_rocm.ops.triton.tiles import flash_tile

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hf_rocm.device import Device
    from hf_rocm.ops.specs.attention import AttentionSpec, AttentionTerms, VarlenSpec, VarlenTerms


def refuses(spec: VarlenSpec, device: Device) -> str | None:
    """Why the kernel can't serve this call to `varlen_attention`, or None."""
    return detect.unavailable(device) or _limits(spec, device)


def attention_refuses(spec: AttentionSpec, device: Device) -> str | None:
    """Why the kernel can't serve this call to `attention`, or None."""
    reason = detect.unavailable(device)
    if reason is not None:
        return reason
    if spec.weights:
        return "the flash kernel doesn't return attention weights"
    if spec.mask is not None:
        return "the flash kernel takes no mask"
    if spec.one_query:
        return "a single query is left to kernels that split the keys"
    return _limits(spec, device) or _gain(spec, device)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor, **terms: Unpack[VarlenTerms]
) -> Tensor | tuple[Tensor, Tensor]:
    """See `hf_rocm.ops.varlen_attention`."""
    batch = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
    lse = None
    if terms["lse"]:
        lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32, device=query.device)
    settings = terms["sinks"], terms["scale"], terms["softcap"], terms["window"], terms["causal"]
    result: Tensor = _traced(*batch, query_ends, key_ends, lse, *settings)
    return result[0] if lse is None else (result[0], lse)


def attention(query: Tensor, key: Tensor, value: Tensor, **terms: Unpack[AttentionTerms]) -> tuple[Tensor, None]:
    """See `hf_rocm.ops.attention`."""
    sinks, scale, softcap, window = terms["sinks"], terms["scale"], terms["softcap"], terms["window"]
    return _traced(query, key, value, None, None, None, sinks, scale, softcap, window, terms["causal"]), None


def _limits(spec: VarlenSpec | AttentionSpec, device: Device) -> str | None:
    if spec.grad:
        return "the flash kernel has no gradient"
    if spec.dtype not in DTYPES:
        return f"the flash kernel supports fp32, bf16 and fp16, not {spec.dtype}"
    if spec.dtype == torch.float32 and device.kind == "cuda":
        # Measured on an H200.
        return "a GPU's exponential function is less accurate than fp32 requires"
    largest = max(spec.head_dim, spec.value_dim)
    if largest > LARGEST_HEAD:
        return f"head dims must be at most {LARGEST_HEAD}, got {spec.head_dim} and {spec.value_dim}"
    if (device.arch or "").startswith("gfx11") and largest > 128:
        return f"on {device.arch} the flash kernel would spill registers for head dims above 128"
    return None


def _gain(spec: AttentionSpec, device: Device) -> str | None:
    """Why PyTorch's own kernel is preferred. None if it is not, or if the triton tier was requested."""
    restricted = spec.window is not None or spec.softcap or spec.sinks or (spec.causal and not spec.square)
    radeon = device.rocm and not (device.arch or "").startswith("gfx9")
    if device.kind == "cpu" or radeon or restricted or options.current().tier("attention") == "triton":
        return None
    return "where no mask is needed, PyTorch has a flash kernel for this GPU"


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor | None,
    key_ends: Tensor | None,
    lse: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    causal: bool,
) -> Tensor:
    from hf_rocm.ops.triton.kernels.flash import flash_kernel

    # The launch does not distinguish integers from other numbers.
    softcap = None if softcap is None else float(softcap)
    b, heads, queries, dim = query.shape
    _, kv_heads, keys, value_dim = value.shape
    shape = (b, queries, heads, value_dim)
    if query_ends is None or key_ends is None:
        output, sequences, span = query.new_empty(shape), 1, 1
    else:
        # rows after the last sequence are unused, as in batches that are padded for graphs
        output, sequences = query.new_zeros(shape), query_ends.numel() - 1
        span = power_of_two(sequences)
        query_ends, key_ends = query_ends.contiguous(), key_ends.contiguous()
    if not output.numel() or not sequences:
        return output
    group = heads // kv_heads
    tile = flash_tile(max(dim, value_dim), query.dtype.itemsize, describe(query.device).arch)
    tiles = -(-queries * group // tile.rows) if query_ends is None else queries * group // tile.rows + sequences
    query, key, value = dense(query), dense(key), dense(value)
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3])
    launch(
        flash_kernel,
        (tiles, kv_heads, b),
        (
            *(query, key, value, output, lse, query_ends, key_ends, sinks, float(scale), softcap),
            *(sequences, span, queries, keys, window, *strides),
        ),
        {
            "HEADS": heads,
            "GROUP": group,
            "DIM": dim,
            "VALUE_DIM": value_dim,
            "CAUSAL": causal,
            "PRECISION": "ieee" if query.dtype == torch.float32 else None,
            "ROWS": tile.rows,
            "BLOCK": tile.keys,
            "BLOCK_D": max(16, power_of_two(dim)),
            "BLOCK_V": max(16, power_of_two(value_dim)),
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
        forms=(
            forms_of(query, key, value, output, lse, query_ends, key_ends, sinks),
            softcap is None,
            *map(form, (sequences, span, queries, keys, window)),
            forms_of_strides(strides),
        ),
    )
    return output


_traced = opaque(
    "triton_flash(Tensor query, Tensor key, Tensor value, Tensor? query_ends, Tensor? key_ends, Tensor(a!)? lse, "
    "Tensor? sinks, float scale, float? softcap, int? window, bool causal) -> Tensor",
    _forward,
    attended,
)
