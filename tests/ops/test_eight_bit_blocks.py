"""8-bit weights with one scale per block of 128 × 128: rounding, dequantising, and GEMMs in PyTorch's tiers."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.ops.eight_bit import BLOCK, FP8, INT8, dequantize_blocks, largest, quantize_blocks
from hf_rocm.ops.specs import quantized
from tests.eight_bit import rounding_error
from tests.tolerance import assert_as_good_as_eager

SIZES = [(128, 128), (1, 1), (129, 127), (300, 257), (16, 400)]
FORMATS = (FP8, INT8)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize(("n", "k"), SIZES, ids=str)
def test_blocks_are_rounded_to_the_nearest_number(n, k, format):
    """The largest magnitude in a block becomes the format's largest number. All-zero blocks have a positive scale."""
    weight = random(n, k)
    weight[:, BLOCK : 2 * BLOCK] *= 2.0**30
    weight[2 * BLOCK :, :BLOCK] = 0
    data, scale = quantize_blocks(weight, format)
    assert data.shape == weight.shape and data.dtype == format
    assert scale.shape == (-(-n // BLOCK), -(-k // BLOCK)) and scale.dtype == torch.float32 and (scale > 0).all()
    back = dequantize_blocks(data, scale, torch.float64)
    for i in range(0, n, BLOCK):
        for j in range(0, k, BLOCK):
            block, index = weight[i : i + BLOCK, j : j + BLOCK], (slice(i, i + BLOCK), slice(j, j + BLOCK))
            numbers = data[index].double() * scale[i // BLOCK, j // BLOCK].double()
            assert torch.equal(back[index], numbers)
            bound = rounding_error(block.reshape(1, -1), format).view(block.shape)
            assert ((numbers - block.double()).abs() <= bound * (1 + 1e-6)).all()
            assert not block.any() or data[index].double().abs().max() == largest(format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tier", "name"), [("torch", "dequantize, F.linear"), ("eager", "dequantize, matmul")])
@pytest.mark.parametrize("m", [1, 64, 70])
def test_pytorchs_tiers_never_round_x(m, tier, name, dtype):
    """x is never rounded, even if the call requests it."""
    n, k = 140, 272
    x, bias = random(m, k, dtype=dtype), random(n, dtype=dtype, seed=2)
    data, scale = quantize_blocks(random(n, k, seed=1) * k**-0.5, FP8)
    scale *= 2.0 ** torch.arange(6).view(2, 3)
    with options.override(tiers={"linear": tier}), ops.recording() as routes:
        output = ops.quantized_linear(x, data, scale, bias)
    assert [(route.tier, route.name) for route in routes] == [(tier, name)]
    weight = dequantize_blocks(data, scale, torch.float64)
    eager = x @ weight.to(dtype).t() + bias
    assert_as_good_as_eager(output, eager, x.double() @ weight.t() + bias.double())


def test_large_weights_are_dequantised_in_parts(monkeypatch):
    """Every part ends at a block boundary."""
    data, scale = quantize_blocks(random(700, 130), FP8)
    x = random(3, 130)
    expected = ops.quantized_linear(x, data, scale)
    for limit in (1, 200 * 130, 300 * 130):
        monkeypatch.setattr(quantized, "_AT_ONCE", limit)
        torch.testing.assert_close(ops.quantized_linear(x, data, scale), expected)
