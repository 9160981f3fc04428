"""8-bit numbers and one scale for each row: the formats, how a row is rounded to them, and how wrong that may be.

A row with the largest magnitude `a` is divided by `a / largest`, so that it fills the format's range, and rounded to
the nearest number of the format. The scale is never 0: a row of zeros stays zeros. A NaN makes its row NaN and no
other; a row with an infinity is not finite either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_rocm.device import Device

INT8 = torch.int8
FP8 = torch.float8_e4m3fn
# The fp8 of MI300: no negative zero, half the range
FP8_FNUZ = torch.float8_e4m3fnuz

FORMATS = (INT8, FP8, FP8_FNUZ)

# Where matrix units multiply fp8, and which of the two encodings they read
_FP8_OF = {"gfx942": FP8_FNUZ, "gfx950": FP8, "gfx1200": FP8, "gfx1201": FP8}

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def fp8_of(device: Device) -> torch.dtype | None:
    """The fp8 format of this device, or None if it has none. Off ROCm it is e4m3fn."""
    return _FP8_OF.get(device.arch or "") if device.rocm else FP8


def largest(format: torch.dtype) -> float:
    """The largest number of a format: 127, 448 or 240."""
    return 127.0 if format == INT8 else torch.finfo(format).max  # int8 without -128: the range is symmetric


def quantize_rows(x: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round each row to 8 bits. x: [..., K] floating. Returns [..., K] of the format and the scales [..., 1] in fp32.

    (In fp64 if x is.) Every operation is one that the compiler can join with its neighbours.
    """
    scale = _scale(x, format)
    rows = x / scale
    if format == INT8:
        return rows.round().to(INT8), scale
    return rows.float().to(format), scale  # not every device rounds fp64 to fp8


def _scale(x: Tensor, format: torch.dtype) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    top = x.abs().amax(dim=-1, keepdim=True).to(wide)
    return (top / largest(format)).clamp(min=_SMALLEST_SCALE)


def dequantize_rows(rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that 8-bit rows stand for, rounded once to dtype. rows: [N, K]; scale: [N]."""
    wide = torch.promote_types(dtype, torch.float32)
    return (rows.to(wide) * scale.to(wide).unsqueeze(-1)).to(dtype)


def rounding_error(x: Tensor, format: torch.dtype) -> Tensor:
    """The largest error that `quantize_rows` may make at each element of x. x: [..., K]. Returns [..., K] in fp64.

    Half a step: int8 has steps of one scale; fp8 has 3 bits after the leading one, so 2⁻⁴ of the number itself, but no
    less than half of its smallest step (2⁻¹⁰ of the scale, 2⁻¹¹ on MI300).
    """
    scale = _scale(x.double(), format)
    if format == INT8:
        return (scale / 2).expand(x.shape)
    half_a_step = torch.finfo(format).smallest_normal / 2**4
    return torch.maximum(x.double().abs() / 2**4, half_a_step * scale)


# Sixteen rows by 32 columns, each stored as runs of 16 columns (16 bytes): run by run, all 16 rows of it.
ROWS, COLUMNS, RUN = 16, 32, 16


def shuffle_rows(rows: Tensor) -> Tensor:
    """8-bit rows [N, K] in the order that aiter's preshuffled GEMMs read, as a copy; N % 16 = K % 32 = 0."""
    n, k = rows.shape
    tiles = rows.reshape(n // ROWS, ROWS, k // COLUMNS, COLUMNS // RUN, RUN)
    return tiles.permute(0, 2, 3, 1, 4).reshape(n, k)


def unshuffle_rows(data: Tensor) -> Tensor:
    """The inverse of `shuffle_rows`."""
    n, k = data.shape
    tiles = data.reshape(n // ROWS, k // COLUMNS, COLUMNS // RUN, ROWS, RUN)
    return tiles.permute(0, 3, 1, 2, 4).reshape(n, k)
