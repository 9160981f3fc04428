"""MXFP4: 4-bit floats (e2m1) in blocks of 32 that share a power of two. OCP Microscaling Formats (MX) v1.0.

A byte contains two numbers, the first in its low bits. A scale is one byte `s` and means 2^(s − 127); 255 is NaN.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

MXFP4 = torch.uint8  # the dtype of the bytes, and of the scales
BLOCK = 32  # numbers with one scale
BYTES = BLOCK // 2

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SMALLEST = 0x00400000  # the bits of 2⁻¹²⁷ in fp32, which is subnormal
_NAN = 0x7FC00000


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise blocks [..., K / 32, 16] with scales [..., K / 32], rounding once to dtype. Returns [..., K].

    Only a magnitude outside the range of dtype is changed.
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
    signed = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((signed[byte & 0xF], signed[byte >> 4]), -1)
