"""Check rounded and decoded MXFP4 numbers against the specification of the format."""

from __future__ import annotations

import math

import pytest
import torch

from hf_rocm.ops.mxfp4 import BLOCK, dequantize, pack, powers, quantize

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def number(code):
    """The value of a code, which has a sign bit, two exponent bits with a bias of 1, and one mantissa bit."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    return (-1) ** sign * (mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2))


def test_every_scale_is_decoded():
    values = powers(torch.arange(256).to(torch.uint8)).double()
    assert values[:255].tolist() == [2.0 ** (scale - 127) for scale in range(255)] and values[255].isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte_is_decoded_with_every_scale(dtype):
    """The first number is in the low bits. Numbers that a dtype can't represent are rounded once."""
    blocks = torch.arange(256).to(torch.uint8).view(1, 16, 16).expand(255, 16, 16)
    scales = torch.arange(255).to(torch.uint8).view(255, 1).expand(255, 16)
    codes = [code for byte in range(256) for code in (byte & 15, byte >> 4)]
    exact = torch.tensor([number(code) for code in codes], dtype=torch.float64)
    expected = (exact * 2.0 ** (torch.arange(255).double() - 127)[:, None]).to(dtype)
    assert torch.equal(dequantize(blocks, scales, dtype), expected)


def test_a_nan_scale_makes_its_block_nan():
    scales = torch.tensor([[127, 255]], dtype=torch.uint8)
    values = dequantize(torch.zeros(1, 2, 16, dtype=torch.uint8), scales, torch.bfloat16)
    assert values.shape == (1, 64) and values[:, 32:].isnan().all() and (values[:, :32] == 0).all()


def nearest(value):
    """The code of the nearest number, computed in float64. If two numbers are equally near, it is the even code."""
    return min(range(8), key=lambda code: (abs(number(code) - abs(value)), code & 1)) | (value < 0) << 3


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_numbers_are_rounded_to_the_nearest_code(dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 8 * BLOCK, generator=generator) * 2.0 ** torch.randint(-9, 5, (3, 1), generator=generator)
    # These values saturate, because the largest number is 6.
    weight[:, -8:] = 7.9 * weight.abs().amax()
    weight = weight.to(dtype)
    codes, scales = quantize(weight)
    for row, row_codes, row_scales in zip(weight.double(), codes, scales, strict=True):
        for block, block_codes, scale in zip(row.view(-1, BLOCK), row_codes.view(-1, BLOCK), row_scales, strict=True):
            step = 2.0 ** (math.floor(math.log2(block.abs().max())) - 2)
            assert 2.0 ** (scale.item() - 127) == step
            assert block_codes.tolist() == [nearest(value / step) for value in block.tolist()]
    back = dequantize(pack(codes), scales, torch.float64)
    size = powers(scales).double().repeat_interleave(BLOCK, 1)
    inside = weight.double().abs() <= 6 * size
    # the error is at most half of the largest step (from 4 to 6), or a whole step for saturated values
    assert ((back - weight.double()).abs() <= torch.where(inside, size, 2 * size)).all() and not inside.all()


def test_ties_are_rounded_to_even_codes():
    """The weight contains the midpoints between adjacent numbers. With the largest midpoint, 5, the scale is 1."""
    midpoints = [(number(code) + number(code + 1)) / 2 for code in range(7)]
    weight = torch.tensor([*midpoints, *(-value for value in midpoints), 4.0] + [0.0] * 17)
    codes, scales = quantize(weight)
    assert scales.item() == 127 and codes[:14].tolist() == [0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14]


@pytest.mark.parametrize("exponent", [-149, -130, -126, -125, -3, 0, 126, 127])
def test_every_magnitude_has_a_scale(exponent):
    """If the largest magnitude of a block is below 2⁻¹²⁴, the block has the smallest scale."""
    weight = torch.zeros(BLOCK).double()
    weight[3] = -(2.0**exponent)
    codes, scales = quantize(weight.float())
    assert scales.item() == max(exponent - 2, -127) + 127
    assert codes[3] == nearest(-(2.0 ** (exponent + 127 - scales.item()))) and not codes[:3].any()


def test_zeros_nan_and_infinities_are_quantised():
    weight = torch.ones(4 * BLOCK)
    weight[:BLOCK], weight[BLOCK + 3], weight[2 * BLOCK] = 0, torch.nan, -torch.inf
    codes, scales = quantize(weight)
    assert scales.tolist()[1:] == [255, 255, 125] and not codes[:BLOCK].any()
    back = dequantize(pack(codes), scales, torch.float32)
    assert (back[:BLOCK] == 0).all() and back[BLOCK : 3 * BLOCK].isnan().all() and (back[3 * BLOCK :] == 1).all()
