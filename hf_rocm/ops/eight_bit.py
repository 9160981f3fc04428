"""8-bit numbers with one scale for each row, or for each block of 128 × 128: the formats, and the rounding.

A row whose largest magnitude is `a` is divided by `a / largest(format)`, so that it uses the whole range of the format,
and is rounded to the nearest number. The scale is never 0, so a row of zeros stays zero. A NaN makes only its own row
NaN. A row that contains an infinity never becomes finite.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rocm.device import Device
from hf_rocm.ops.aiter.layout import shuffle_tiles, unshuffle_tiles

INT8 = torch.int8
FP8 = torch.float8_e4m3fn
# The fp8 format of MI300: no negative zero, and about half the range.
FP8_FNUZ = torch.float8_e4m3fnuz

# The GPUs whose matrix units multiply fp8, and the encoding that they use.
_FP8_OF = {"gfx942": FP8_FNUZ, "gfx950": FP8, "gfx1200": FP8, "gfx1201": FP8}

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def fp8_of(device: Device) -> torch.dtype | None:
    """The fp8 format of this device, or None if it has none. Without ROCm it is e4m3fn."""
    return _FP8_OF.get(device.arch or "") if device.rocm else FP8


def largest(format: torch.dtype) -> float:
    """The largest number of a format: 127, 448 or 240."""
    # The range of int8 is symmetric, because -128 is not used.
    return 127.0 if format == INT8 else torch.finfo(format).max


def quantize_rows(x: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise each row of a floating-point x [..., K] to 8 bits. Returns [..., K] in the format and scales [..., 1].

    The scales are fp64 if x is fp64, otherwise fp32. torch.compile can fuse all operations of this function.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    top = x.abs().amax(dim=-1, keepdim=True).to(wide)
    scale = (top / largest(format)).clamp(min=_SMALLEST_SCALE)
    rows = x / scale
    if format == INT8:
        return rows.round().to(INT8), scale
    # Not every device rounds fp64 to fp8.
    return rows.float().to(format), scale


def dequantize_rows(rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise 8-bit rows [N, K] with scales [N], rounding once to dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    return (rows.to(wide) * scale.to(wide).unsqueeze(-1)).to(dtype)


# Rows and columns that share a scale.
BLOCK = 128


def quantize_blocks(weight: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise a weight [N, K] to 8 bits with one scale per block; the last blocks may be smaller.

    Returns [N, K] in the format, and scales [⌈N / 128⌉, ⌈K / 128⌉] in fp32.
    """
    n, k = weight.shape
    whole = F.pad(weight, (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = whole.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2)
    rows, scale = quantize_rows(blocks.flatten(2), format)
    data = rows.view(torch.uint8).view(blocks.shape).transpose(1, 2).reshape(whole.shape)[:n, :k]
    return data.contiguous().view(format), scale.squeeze(-1).float()


def dequantize_blocks(rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise 8-bit rows [N, K] with one scale per block, rounding once to dtype."""
    n, k = rows.shape
    wide = torch.promote_types(dtype, torch.float32)
    scales = scale.to(wide).repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return (rows.to(wide) * scales).to(dtype)


# 8-bit columns that are stored together.
RUN = 16


def shuffle_rows(rows: Tensor) -> Tensor:
    """Copy 8-bit rows [N, K] into the order that aiter's preshuffled GEMMs read; N % 16 = K % 32 = 0."""
    return shuffle_tiles(rows, RUN)


def unshuffle_rows(data: Tensor) -> Tensor:
    """The inverse of `shuffle_rows`."""
    return unshuffle_tiles(data, RUN)
