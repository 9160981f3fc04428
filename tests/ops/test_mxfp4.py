"""Check decoded MXFP4 numbers against the specification of the format."""

from __future__ import annotations

import pytest
import torch

from hf_rocm.ops.mxfp4 import dequantize, powers

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def number(code):
    """A code has a sign bit, two exponent bits with a bias of 1, and one mantissa bit."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    return (-1) ** sign * (mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2))


def test_every_scale():
    values = powers(torch.arange(256).to(torch.uint8)).double()
    assert values[:255].tolist() == [2.0 ** (scale - 127) for scale in range(255)] and values[255].isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte_under_every_scale(dtype):
    """The first number is in the low bits. Numbers that a dtype can't represent are rounded once."""
    blocks = torch.arange(256).to(torch.uint8).view(1, 16, 16).expand(255, 16, 16)
    scales = torch.arange(255).to(torch.uint8).view(255, 1).expand(255, 16)
    codes = [code for byte in range(256) for code in (byte & 15, byte >> 4)]
    exact = torch.tensor([number(code) for code in codes], dtype=torch.float64)
    expected = (exact * 2.0 ** (torch.arange(255).double() - 127)[:, None]).to(dtype)
    assert torch.equal(dequantize(blocks, scales, dtype), expected)


def test_a_block_of_a_nan_scale():
    scales = torch.tensor([[127, 255]], dtype=torch.uint8)
    values = dequantize(torch.zeros(1, 2, 16, dtype=torch.uint8), scales, torch.bfloat16)
    assert values.shape == (1, 64) and values[:, 32:].isnan().all() and (values[:, :32] == 0).all()
