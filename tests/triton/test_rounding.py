"""Rows rounded by the Triton kernel equal those of PyTorch's operations bit for bit."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.ops import probe_cases
from hf_rocm.ops.eight_bit import FP8, FP8_FNUZ, INT8, fp8_of, largest, quantize_rows
from hf_rocm.ops.round_rows import round_rows
from hf_rocm.ops.specs.quantized import RoundingSpec
from hf_rocm.ops.triton import rounding
from tests.triton.routed import compiled_once, here, random

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SPEC = RoundingSpec(BF16, INT8, torch.device("cpu"), 64)
every_dtype = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
every_format = pytest.mark.parametrize("format", [INT8, FP8, FP8_FNUZ], ids=str)


def assert_as_pytorch(x: torch.Tensor, format: torch.dtype) -> None:
    if format not in (INT8, fp8_of(here())):
        pytest.skip("not run: this GPU does not round to this format")
    with ops.recording() as routes:
        rows, scale = round_rows(x, format)
    assert [(route.operation, route.tier) for route in routes] == [("round_rows", "triton")]
    expected, expected_scale = quantize_rows(x, format)
    assert rows.dtype == format and rows.is_contiguous() and scale.is_contiguous()
    assert scale.dtype == FP32 and torch.equal(scale.isnan(), expected_scale.isnan())
    assert torch.equal(scale.nan_to_num(), expected_scale.nan_to_num())
    # A row whose scale is not finite is not finite either, whatever its 8-bit numbers are.
    finite = expected_scale.isfinite()[:, 0]
    assert torch.equal(rows[finite].view(torch.uint8), expected[finite].view(torch.uint8))


# The values of K result in partial blocks, whole blocks, and several blocks.
@every_format
@every_dtype
@pytest.mark.parametrize("k", [1, 16, 67, 2048, 4100])
def test_rows_are_rounded_as_by_pytorch(k, dtype, format):
    x = random(6, k, dtype=FP32, seed=1)
    x[1] = 0
    x[2] *= 2.0**-20
    x[3] *= 2.0**13
    x[4, k // 2] = 60000.0
    assert_as_pytorch(x.to(dtype), format)


@every_format
def test_numbers_midway_between_two_others_are_rounded_to_even(format):
    codes = torch.arange(256).to(torch.uint8).view(format).float()
    numbers = codes[codes.isfinite()].unique()
    middle = (numbers[1:] + numbers[:-1]) / 2
    top = torch.tensor([largest(format)])
    x = torch.cat([top, numbers, middle, middle * (1 + 2.0**-8), middle * (1 - 2.0**-8)]).clamp(-top, top)
    assert_as_pytorch(torch.stack([x, x * 2.0**-30, x.flip(0) * 2.0**20]), format)


@every_format
def test_rows_that_are_not_finite_have_no_finite_scale(format):
    x = random(5, 3000, dtype=BF16)
    x[0, 2999], x[1, 5], x[2, 2048], x[3, 7] = torch.nan, torch.inf, -torch.inf, -torch.nan
    assert_as_pytorch(x, format)
    if format == INT8:
        scale = round_rows(x, format)[1][:, 0]
        assert scale.isfinite().tolist() == [False] * 4 + [True]


@every_format
def test_the_smallest_scale_is_a_normal_number(format):
    assert_as_pytorch(torch.tensor([[2.0**-130, -(2.0**-131)], [2.0**-120, 2.0**-126]]), format)


def test_a_view_and_no_rows_are_supported():
    x = random(8, 96, dtype=BF16)
    assert_as_pytorch(x[::2, :48], INT8)
    rows, scale = round_rows(x[:0], INT8)
    assert rows.shape == (0, 96) and scale.shape == (0, 1)


def test_the_input_of_an_8_bit_gemm_is_rounded_by_the_kernel():
    x, weight = random(40, 64, dtype=BF16), random(32, 64, dtype=BF16, seed=1)
    data, scale = quantize_rows(weight, INT8)
    with ops.recording() as routes, options.override(tiers={"linear": "triton"}):
        round_rows(x, INT8)
    assert [route.tier for route in routes] == ["triton"]
    with ops.recording() as routes:
        output = ops.quantized_linear(x, data, scale.flatten())
    served = {route.operation: route.tier for route in routes}
    assert served["round_rows"] == "triton" or served["quantized_linear"] == "eager"
    rows, row_scale = quantize_rows(x, INT8)
    exact = (rows.double() @ data.double().t()) * row_scale.double() * scale.double().t()
    assert torch.allclose(output.double(), exact, rtol=2**-7, atol=0)


@pytest.mark.parametrize("tier", ["aiter", "torch", "eager"])
def test_a_tier_that_was_named_for_linear_layers_is_not_replaced(tier):
    x = random(3, 64, dtype=BF16)
    with options.override(tiers={"linear": tier}), ops.recording() as routes:
        rows, scale = round_rows(x, INT8)
    # PyTorch's operations ran, which record no route.
    assert routes == []
    expected, expected_scale = quantize_rows(x, INT8)
    assert torch.equal(rows, expected) and torch.equal(scale, expected_scale)


def test_one_graph_contains_pytorchs_operations():
    x = random(3, 64, dtype=BF16)
    nodes = compiled_once(lambda x: round_rows(x, INT8)[1] * 2, x)
    assert nodes and not any("hf_rocm" in node for node in nodes)


@pytest.mark.parametrize("dim", [64, 5000])
def test_the_first_use_check_passes(dim):
    kind = probe_cases.kind("round_rows", SPEC._replace(dim=dim))
    assert probe_cases.check("round_rows", "triton", rounding.NAME, kind) is None


@pytest.mark.parametrize(
    ("change", "reason"), [({"dtype": torch.float64}, "not torch.float64"), ({"format": FP8_FNUZ}, "no instruction")]
)
def test_unsupported_calls_are_refused(change, reason):
    assert rounding.refuses(SPEC, here()) is None
    if fp8_of(here()) != FP8_FNUZ or "dtype" in change:
        assert reason in str(rounding.refuses(SPEC._replace(**change), here()))
