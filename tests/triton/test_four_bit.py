"""quantized_linear with 4-bit weights in the Triton kernels, compared with float64: every group and run length."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hf_rocm import ops
from hf_rocm.ops import four_bit
from hf_rocm.ops.four_bit import GROUPS, quantize_groups
from hf_rocm.ops.triton import quantized
from tests.amdgcn import suite
from tests.triton.routed import random, routed
from tests.triton.test_four_bit_codes import execute
from tests.triton.test_quantized import BF16, FORMS, FP16, check, check_once


@pytest.mark.parametrize("m", [1, 2, 5, 16, 17, 64])
def test_every_class_of_rows(m):
    # With K = 2560, the loop takes several iterations.
    for k in (512,) if suite.gpu() is None else (512, 2560):
        x, weight = random(m, k, dtype=BF16), random(21, k, dtype=BF16, seed=1)
        check(x, *quantize_groups(weight, 128))


# The values of K result in whole blocks with runs of 64, 32 and 16, and in partial blocks.
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("k", [128, 256, 640, 1536, 4608])
@pytest.mark.parametrize("m", [1, 3])
def test_every_group_and_run(m, k, group):
    dtype = FP16 if k == 640 else BF16
    # Odd factors don't change the run length.
    for columns in (k,) if suite.gpu() is None or k > 640 else (k, 5 * k):
        x, weight = random(m, columns, dtype=dtype), random(18, columns, dtype=dtype, seed=1)
        check(x, *quantize_groups(weight, group), random(18, dtype=dtype, seed=2))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("m", [1, 5])
def test_norm_gate_and_residual_are_fused(m, form):
    n, k = 38, 640
    columns = n // 2 if "activation" in form else n
    x, weight = random(1, m, k, dtype=BF16), random(n, k, dtype=BF16, seed=1) * k**-0.5
    kwargs: dict[str, Any] = {"activation": form.get("activation")}
    if "norm" in form:
        kwargs["norm"] = ops.Norm(random(k, dtype=BF16, seed=3), 1e-5, True)
    if "residual" in form:
        kwargs["residual"] = random(1, m, columns, dtype=BF16, seed=4)
    check(x, *quantize_groups(weight, 64), random(n, dtype=BF16, seed=2) if "bias" in form else None, **kwargs)


def zero_points(scale: torch.Tensor) -> torch.Tensor:
    """Returns zero points from 0 to 16. With 16, which GPTQ can store, no number of the group dequantises to 0."""
    return (torch.arange(scale.numel()) % 17).view(scale.shape).to(torch.uint8)


# With one scale per row, K = 640 and 1536 have several blocks of runs. The others have 1, 4 or 8 groups per block.
@pytest.mark.parametrize("scales", [BF16, FP16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("k", "group"),
    [(640, 128), (640, 32), (256, 64), (768, 32), (1536, 128), (640, 640), (1536, 1536), (128, 128)],
)
@pytest.mark.parametrize("m", [1, 3])
def test_zero_points_and_any_dtype_of_scales_are_supported(m, k, group, scales):
    dtype = FP16 if k == 768 else BF16
    x, weight = random(m, k, dtype=dtype), random(18, k, dtype=dtype, seed=1)
    words, scale = quantize_groups(weight, group)
    check(x, words, scale.to(scales) * 1.001)
    check(x, words, scale.to(scales), random(18, dtype=dtype, seed=2), zeros=zero_points(scale))
    check(x, words, scale.to(scales), zeros=zero_points(scale), activation="silu")


@pytest.mark.parametrize("m", [1, 3])
def test_scales_and_zero_points_at_any_address_are_supported(m):
    x = random(m, 512, dtype=BF16)
    words, scale = quantize_groups(random(16, 512, dtype=BF16, seed=1), 128)
    zeros = zero_points(scale)
    expected = routed("quantized_linear", x, words, scale, zeros=zeros)
    scale, zeros = (torch.cat([part.flatten()[:1], part.flatten()])[1:].view_as(part) for part in (scale, zeros))
    assert scale.data_ptr() % 4 and zeros.data_ptr() % 4
    assert torch.equal(routed("quantized_linear", x, words, scale, zeros=zeros), expected)


@pytest.mark.parametrize("units", [0, 1000])
@pytest.mark.parametrize("m", [17, 64])
def test_programs_split_k_on_a_gpu_with_many_units(m, units, monkeypatch):
    monkeypatch.setattr(quantized, "units", lambda device: units)
    x, weight = random(m, 1280, dtype=BF16), random(18, 1280, dtype=BF16, seed=1)
    words, scale = quantize_groups(weight, 32)
    check(x, words, scale, random(18, dtype=BF16, seed=2), zeros=zero_points(scale))


@pytest.mark.parametrize("m", [1, 4])
def test_zeros_extremes_and_nan_affect_only_their_row(m):
    weight = random(24, 256, dtype=BF16, seed=1)
    weight[3] = 0
    weight[4] *= 2.0**-100
    weight[5] *= 2.0**100
    weight[7, 200] = torch.nan
    words, scale = quantize_groups(weight, 128)
    x = random(m, 256, dtype=BF16)
    output = routed("quantized_linear", x, words, scale)
    assert output[:, 7].isnan().all() and torch.isfinite(output[:, :7]).all() and (output[:, 3] == 0).all()
    check(x, *(part[[*range(7), *range(8, 24)]] for part in (words, scale)))


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_value_is_decoded_at_every_position(m, dtype):
    """The nonzero elements of every row of x are 1 and 16, so a result is exactly one number plus 16 times another."""
    levels = torch.arange(16).repeat(8)[torch.randperm(128, generator=torch.Generator().manual_seed(0))].view(1, 128)
    # With 9 groups, the loop takes several iterations.
    groups = 1 if suite.gpu() is None else 9
    levels = torch.cat([levels.roll(step, 1) for step in range(16)]).int().repeat(1, groups)
    k = levels.shape[1]
    words, scale = four_bit.packed(levels, four_bit.run_length(k, 128)), torch.ones(16, groups, dtype=BF16)
    weight = (levels - 8).to(dtype)
    columns = torch.randperm(128, generator=torch.Generator().manual_seed(1)).view(-1, m, 2)
    for index, pairs in enumerate(columns[:8] if suite.gpu() is None else columns):
        pairs = pairs + index % groups * 128
        x = torch.zeros(m, k, dtype=dtype)
        x.scatter_(1, pairs, torch.tensor([1, 16], dtype=dtype).expand(m, 2))
        output = routed("quantized_linear", x, words, scale)
        assert torch.equal(output, (weight[:, pairs[:, 0]] + 16 * weight[:, pairs[:, 1]]).T)
    # Also run distinct rows and columns that fill a block.
    if suite.gpu() is not None:
        scale = torch.arange(1, 65, dtype=BF16)[:, None].repeat(1, groups)
        check_once(random(m if m == 1 else 13, k, dtype=dtype), words.repeat(4, 1), scale, None)


@pytest.mark.parametrize("run", range(8))
def test_nvidias_instructions_insert_numbers_of_two_words_at_a_time(run):
    """Neither the interpreter nor AMD's machine code executes this PTX. The operands are those of `integers`."""
    from hf_rocm.ops.triton.kernels import four_bit as kernels

    words = 0x76543210, 0xFEDCBA98, 0x13579BDF
    for dtype, bits, offset in ((BF16, 0x43004300, 128), (FP16, 0x64006400, 1024)):
        for pair in itertools.product(words, repeat=2):
            more = (0x7632 if run >= 4 else 0x5410, run % 4 * 4, bits)
            operands = [*pair, *(value for value in more for _ in range(2))]
            (both,) = execute(kernels._PAIR.value.split("\n")[2:-1], operands, count=1)
            numbers = torch.tensor([both & 0xFFFF, both >> 16], dtype=torch.int16).view(dtype)
            assert (numbers - offset).tolist() == [word >> (4 * run) & 0xF for word in pair]
