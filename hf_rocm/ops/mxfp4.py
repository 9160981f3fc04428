"""MXFP4: 4-bit floats (e2m1) in blocks of 32 that share a power of two. OCP Microscaling Formats (MX) v1.0.

A byte contains two numbers, the first in its low bits. A scale is one byte `s` and represents 2^(s − 127); 255 is NaN.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

# The dtype of the bytes, and of the scales.
MXFP4 = torch.uint8
# Numbers that share a scale.
BLOCK = 32
BYTES = BLOCK // 2

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The numbers of the 16 codes, which consist of a sign bit and the index of a magnitude.
NUMBERS = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
# The bits of 2⁻¹²⁷ in fp32, which is subnormal.
_SMALLEST = 0x00400000
_NAN = 0x7FC00000


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight [..., K] to codes [..., K] and scales [..., K / 32], both uint8. K is a multiple of 32.

    A block whose largest magnitude is `a` has the scale 2^(floor(log2(a)) − 2), but at least 2⁻¹²⁷. Its numbers are
    rounded to the nearest, ties to even, and saturate at 6 times the scale (section 6.3). A NaN or an infinity makes
    its block NaN.
    """
    numbers = weight.float().unflatten(-1, (-1, BLOCK))
    largest = numbers.abs().amax(-1)
    # frexp's mantissas are in [½, 1).
    exponent = largest.frexp().exponent - 3 + 127
    scales = torch.where(largest == 0, 0, exponent.clamp(min=0)).to(MXFP4)
    # the reciprocal of a scale is a power of two as well
    size = numbers.abs() * powers(254 - scales).unsqueeze(-1)
    codes = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4)).round().clamp(max=7)
    codes = torch.where(numbers.signbit(), codes + 8, codes)
    finite = largest.isfinite()
    scales = torch.where(finite, scales, 255).to(MXFP4)
    return torch.where(finite.unsqueeze(-1), codes, 0).to(MXFP4).flatten(-2), scales


def pack(codes: Tensor) -> Tensor:
    """The bytes [..., K / 32, 16] of codes [..., K]."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).unflatten(-1, (-1, BYTES))


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise blocks [..., K / 32, 16] with scales [..., K / 32], rounding once to dtype. Returns [..., K].

    A number is changed only if it exceeds the range of dtype or is subnormal in dtype.
    """
    wide = torch.promote_types(dtype, torch.float32)
    numbers = _numbers(blocks.device)[blocks.int()].to(wide)  # [..., K / 32, 16, 2]
    numbers *= powers(scales).to(wide)[..., None, None]
    return numbers.flatten(-3).to(dtype)


def powers(scales: Tensor) -> Tensor:
    """The scales in fp32, which represents all of them exactly."""
    bits = scales.int() << 23
    bits = torch.where(scales == 0, _SMALLEST, bits)
    return torch.where(scales == 255, _NAN, bits).view(torch.float32)


@cache
def _numbers(device: torch.device) -> Tensor:
    """The two numbers of every byte, [256, 2] fp32."""
    signed = torch.tensor(NUMBERS, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((signed[byte & 0xF], signed[byte >> 4]), -1)
