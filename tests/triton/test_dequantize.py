"""8- and 4-bit weights dequantised by Triton kernels equal the torch tier's. GEMMs are compared with float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.ops import probe_cases
from hf_rocm.ops import quantized as operation
from hf_rocm.ops.eight_bit import FP8, INT8, dequantize_rows
from hf_rocm.ops.four_bit import GROUPS, dequantize_groups, quantize_groups
from hf_rocm.ops.quantized import ROUNDED_FROM, keeps_input
from hf_rocm.ops.triton import quantized
from tests.amdgcn import suite
from tests.triton.routed import compiled_once, here, random
from tests.triton.test_quantized import BF16, FORMATS, FORMS, FP16, SPEC, as_good_as_eager, every_format, rounded

FP32 = torch.float32
MANY_ROWS = SPEC._replace(rows=0)
every_dtype = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)


def assert_same(output: torch.Tensor, expected: torch.Tensor) -> None:
    assert output.dtype == expected.dtype and torch.equal(output.isnan(), expected.isnan())
    assert torch.equal(output.nan_to_num(0.0), expected.nan_to_num(0.0))


def extreme(n: int, k: int) -> torch.Tensor:
    """A weight with rows of zeros, tiny numbers and large numbers."""
    weight = random(n, k, dtype=FP32, seed=1)
    weight[1] = 0
    weight[2] *= 2.0**-100
    weight[3] *= 2.0**100
    return weight


@every_dtype
@every_format
@pytest.mark.parametrize("k", [1, 16, 67, 2048, 2100])
def test_eight_bit_weights_equal_the_torch_tier(k, format, dtype):
    data, scale = rounded(extreme(5, k), format)
    # All codes occur if K is large enough.
    codes = (torch.arange(k) * 37 % 256).to(torch.uint8).view(format)
    # Weights have no NaN codes.
    data[0] = torch.where(codes.float().isnan(), data[0].float(), codes.float()).to(format)
    scale[4] = torch.nan
    assert_same(quantized._dequantized(data, scale, dtype), dequantize_rows(data, scale, dtype))


# The values of K result in runs of 16, 32 and 64 numbers, in partial blocks, and in several programs.
@every_dtype
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("k", [128, 640, 896, 4608])
def test_four_bit_weights_equal_the_torch_tier(k, group, dtype):
    weight = extreme(5, k)
    weight[4, k - 1] = torch.nan
    words, scale = quantize_groups(weight, group)
    assert_same(quantized._dequantized(words, scale, dtype), dequantize_groups(words, scale, dtype))


@every_dtype
@pytest.mark.parametrize(("k", "group"), [(128, 32), (640, 128), (640, 640)])
def test_zero_points_are_subtracted(k, group, dtype):
    words, scale = quantize_groups(extreme(17, k), group)
    zeros = torch.arange(17 * (k // group)).remainder(17).view(scale.shape).to(torch.uint8)
    for scales in (BF16, FP16, FP32):
        expected = dequantize_groups(words, scale.to(scales), dtype, zeros)
        assert_same(quantized._dequantized(words, scale.to(scales), dtype, zeros), expected)
        assert not torch.equal(expected, dequantize_groups(words, scale.to(scales), dtype))


def test_short_runs_are_dequantised():
    words, scale = quantize_groups(extreme(5, 32), 32)
    assert_same(quantized._dequantized(words, scale, BF16), dequantize_groups(words, scale, BF16))


def encoded(weight: torch.Tensor, kind: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_groups(weight, kind) if isinstance(kind, int) else rounded(weight, kind)


@pytest.mark.parametrize("form", [{"bias": True}, *FORMS], ids=str)
@pytest.mark.parametrize("kind", [*FORMATS, *GROUPS], ids=str)
def test_many_rows_use_a_dequantised_weight(kind, form):
    m, n, k = 65, 38, 128
    x, weight = random(1, m, k, dtype=BF16), random(n, k, dtype=BF16, seed=1) * k**-0.5
    kwargs: dict[str, Any] = {"activation": form.get("activation")}
    if "norm" in form:
        kwargs["norm"] = ops.Norm(random(k, dtype=BF16, seed=3), 1e-5, True)
    if "residual" in form:
        kwargs["residual"] = random(1, m, n // 2 if "activation" in form else n, dtype=BF16, seed=4)
    bias = random(n, dtype=BF16, seed=2) if "bias" in form else None
    data, scale = encoded(weight, kind)
    with ops.recording() as routes:
        output = ops.quantized_linear(x, data, scale, bias, round_input=False, **kwargs)
    routes = [route for route in routes if route.operation == "quantized_linear"]
    assert [(route.tier, route.name) for route in routes] == [("triton", quantized.DEQUANTIZE)]
    as_good_as_eager(output, x, data, scale, bias, **kwargs)
    # Decode all codes with the same compiled variant.
    if suite.gpu() is not None and not isinstance(kind, int):
        codes = torch.arange(n * k).remainder(256).to(torch.uint8).view(n, k)
        # Weights have no NaN codes.
        data = codes.masked_fill(codes.view(kind).float().isnan(), 0).view(kind)
        assert_same(quantized._dequantized(data, scale, BF16), dequantize_rows(data, scale, BF16))


@pytest.mark.parametrize("kind", [INT8, 32], ids=str)
def test_it_compiles_into_one_graph(kind):
    x, weight = random(70, 64, dtype=BF16), random(32, 64, dtype=BF16)

    def function(x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return ops.quantized_linear(x, data, scale, round_input=False)

    assert "hf_rocm.triton_dequantize.default" in compiled_once(function, x, *encoded(weight, kind))


@pytest.mark.parametrize("format", [FP8, INT8], ids=str)
def test_few_rows_are_not_rounded(format):
    """Without aiter, x is rounded only for fp8, and only if it has enough rows for this to be faster.

    If the Triton tier is selected, x is never rounded. `keeps_input` is also false for an x without rows.
    """
    x, weight = random(ROUNDED_FROM, 64, dtype=BF16), random(32, 64, dtype=BF16)
    data, scale = rounded(weight, format)
    arguments = (data, scale, None, False)
    assert keeps_input(x[:65], *arguments) and keeps_input(x[:-1], *arguments)
    assert keeps_input(x, *arguments) is (format == INT8) and not keeps_input(x[:0], *arguments)
    with options.override(tiers={"linear": "triton"}):
        assert keeps_input(x, *arguments)


def test_rounded_gemms_of_aiter_come_first(monkeypatch):
    tiers = {False: "triton", True: "aiter"}
    monkeypatch.setattr(operation, "_tier", lambda spec: tiers[spec.round_input])
    assert not operation.keeps_rows(MANY_ROWS, 65) and operation.keeps_rows(SPEC, 1)


@pytest.mark.parametrize("kind", [INT8, 128], ids=str)
def test_the_first_use_check_passes(kind):
    group = 0 if kind == INT8 else kind
    spec = MANY_ROWS._replace(format=torch.int32 if group else kind, group=group, k=128)
    assert probe_cases.check("quantized_linear", "triton", quantized.DEQUANTIZE, spec) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"round_input": True}, "rounds x"),
        ({"rows": 1}, "few rows"),
        ({"dtype": torch.float32}, "not torch.float32"),
        ({"shuffled": True}, "plain order"),
    ],
    ids=str,
)
def test_unsupported_calls_are_refused(change, reason):
    assert reason in str(quantized.dequantize_refuses(MANY_ROWS._replace(**change), here()))
    assert quantized.dequantize_refuses(MANY_ROWS, here()) is None
