"""MXFP4 according to the format's specification, computed with numpy. Ties are rounded toward zero, not to even."""

from __future__ import annotations

import numpy
import torch

MAGNITUDES = numpy.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round a weight [..., K]. Returns (blocks, scales, the weight that they represent in float64)."""
    values = weight.double().numpy().reshape(*weight.shape[:-1], -1, 32)
    top = numpy.abs(values).max(-1)
    exponent = numpy.clip(numpy.floor(numpy.log2(numpy.where(top == 0, 1, top))) - 2, -127, 127)
    scaled = numpy.abs(values) / numpy.exp2(exponent)[..., None]
    codes = numpy.abs(scaled[..., None] - MAGNITUDES).argmin(-1)
    signs = (values < 0).astype(numpy.int64)
    numbers = codes + 8 * signs
    blocks = (numbers[..., 0::2] + 16 * numbers[..., 1::2]).astype(numpy.uint8)
    exact = MAGNITUDES[codes] * (1 - 2 * signs) * numpy.exp2(exponent)[..., None]
    scales = (exponent + 127).astype(numpy.uint8)
    return torch.from_numpy(blocks), torch.from_numpy(scales), torch.from_numpy(exact.reshape(weight.shape))
