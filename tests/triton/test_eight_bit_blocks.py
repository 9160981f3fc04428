"""quantized_linear with one scale per block of 128 × 128, in the Triton kernels, compared with float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_rocm import ops
from hf_rocm.device import Device
from hf_rocm.errors import TierUnavailable
from hf_rocm.ops import probe_cases
from hf_rocm.ops import quantized as operation
from hf_rocm.ops.eight_bit import BLOCK, FP8, dequantize_blocks, quantize_blocks
from hf_rocm.ops.triton import quantized
from hf_rocm.ops.triton.tiles import NARROW
from tests.amdgcn import suite
from tests.triton.routed import compiled_once, here, random, routed
from tests.triton.test_dequantize import MANY_ROWS, assert_same
from tests.triton.test_quantized import BF16, FORMS, FP16, SPEC, as_good_as_eager, check_once

FP32 = torch.float32
RDNA3 = (suite.arch() or "").startswith("gfx11")
GFX1100 = Device("cuda", True, "gfx1100")
served = pytest.mark.skipif(RDNA3, reason="refused on RDNA 3, as test_norm_gate_and_residual_are_fused shows")
# In machine code, the loop over K takes several iterations.
ITERATIONS = 1 if suite.gpu() is None else 9


def blocks(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a weight and its scales. Neighbouring blocks have different scales, so that a wrong scale is detected."""
    weight = random(n, k, dtype=FP32, seed=1) * k**-0.5
    data, scale = quantize_blocks(weight, FP8)
    return data, scale * (1 + torch.arange(scale.numel()).view(scale.shape) % 5)


@served
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 16, 17, 33, 64])
def test_every_class_of_rows(m):
    k = 144 + 128 * ITERATIONS
    check_once(random(m, k, dtype=BF16), *blocks(150, k), None)


@served
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("n", "k"), [(16, 16), (37, 63), (128, 128), (129, 129), (260, 1024), (131, 1100), (20, 2100)], ids=str
)
@pytest.mark.parametrize("m", [1, 3])
def test_odd_sizes(m, n, k, dtype):
    # With a larger K, the loop takes several iterations.
    for columns in {k, k + 1024 * (ITERATIONS > 1 and k < 1024)}:
        check_once(random(2, m, columns, dtype=dtype)[:1], *blocks(n, columns), random(n, dtype=dtype, seed=2))


@served
def test_wide_weights_use_their_own_tile():
    check_once(random(5, 160, dtype=BF16), *blocks(4112, 160), None)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("m", [1, 5])
def test_norm_gate_and_residual_are_fused(m, form):
    n, k = 512, 72 + 128 * ITERATIONS
    columns = n // 2 if "activation" in form else n
    x = random(1, m, k, dtype=BF16)
    kwargs: dict[str, Any] = {"activation": form.get("activation")}
    if "norm" in form:
        kwargs["norm"] = ops.Norm(random(k, dtype=BF16, seed=3), 1e-5, True)
    if "residual" in form:
        kwargs["residual"] = random(1, m, columns, dtype=BF16, seed=4)
    bias = random(n, dtype=BF16, seed=2) if "bias" in form else None
    if RDNA3:
        with pytest.raises(TierUnavailable, match="on RDNA 3, a wait is missing"):
            routed("quantized_linear", x, *blocks(n, k), bias, round_input=False, **kwargs)
        return
    check_once(x, *blocks(n, k), bias, **kwargs)


@served
@pytest.mark.parametrize("m", [1, 2])
def test_every_scale_applies_to_its_block(m):
    """With all weights equal to 1, and a single nonzero column of x, the results are the scales themselves."""
    n, k = 260, 1100
    data = torch.ones(n, k).to(FP8)
    scale = 2.0 ** torch.arange(-13, 14).view(3, 9)
    for column in (0, 127, 128, 1023, 1099):
        x = torch.zeros(m, k, dtype=BF16)
        x[:, column] = 1
        output = routed("quantized_linear", x, data, scale)
        expected = scale[:, column // BLOCK].repeat_interleave(BLOCK)[:n]
        assert torch.equal(output.float(), expected.expand(m, -1))


@served
@pytest.mark.parametrize("m", [1, 4])
def test_zeros_extremes_and_nan_affect_only_their_block(m):
    n, k = 260, 400
    data, scale = blocks(n, k)
    x = random(m, k, dtype=BF16)
    scale[0] = 0
    scale[1, 0], scale[1, 3] = 2.0**-120, 2.0**90
    output = check_once(x, data, scale, None)
    assert (output[:, :128] == 0).all()
    whole = routed("quantized_linear", x, data, scale)
    scale[1, 2] = torch.nan
    output = routed("quantized_linear", x, data, scale)
    assert output[:, 128:256].isnan().all()
    assert torch.equal(output[:, :128], whole[:, :128]) and torch.equal(output[:, 256:], whole[:, 256:])


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("k", [1, 16, 67, 128, 2048, 2100, 4352])
def test_dequantised_weights_equal_the_torch_tier(k, dtype):
    data, scale = blocks(130, k)
    # All codes occur if K is large enough.
    codes = (torch.arange(k) * 37 % 256).to(torch.uint8).view(FP8)
    data[0] = torch.where(codes.float().isnan(), data[0].float(), codes.float()).to(FP8)
    scale[1, -1] = torch.nan
    assert_same(quantized._dequantized(data, scale, dtype), dequantize_blocks(data, scale, dtype))


@pytest.mark.parametrize("form", [{"bias": True}, {"activation": "silu"}], ids=str)
def test_many_rows_use_a_dequantised_weight(form):
    x, bias = random(65, 200, dtype=BF16), random(140, dtype=BF16, seed=2) if "bias" in form else None
    data, scale = blocks(140, 200)
    more = {"activation": form.get("activation")}
    with ops.recording() as routes:
        output = ops.quantized_linear(x, data, scale, bias, **more)
    routes = [route for route in routes if route.operation == "quantized_linear"]
    assert [(route.tier, route.name) for route in routes] == [("triton", quantized.DEQUANTIZE)]
    as_good_as_eager(output, x, data, scale, bias, **more)


@served
@pytest.mark.parametrize("m", [4, 70])
def test_it_compiles_into_one_graph(m):
    def function(x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return ops.quantized_linear(x, data, scale)

    assert compiled_once(function, random(m, 192, dtype=BF16), *blocks(144, 192))


@served
def test_the_first_use_checks_pass():
    spec = MANY_ROWS._replace(format=FP8, group=BLOCK, k=144, n=256, activation="silu")
    names = (quantized.NAME, quantized.DEQUANTIZE)
    assert [probe_cases.check("quantized_linear", "triton", name, spec) for name in names] == [None, None]


def test_a_gate_is_checked_with_whole_blocks():
    spec = SPEC._replace(format=FP8, group=BLOCK, activation="silu", n=2 * 14336, k=8192)
    kind = operation._kind(spec)
    assert (kind.n % (2 * BLOCK), kind.k % BLOCK, kind.group) == (0, 0, BLOCK) and NARROW < kind.n < 5000


@served
def test_unsupported_calls_are_refused():
    spec = SPEC._replace(format=FP8, group=BLOCK, activation="silu")
    assert "multiple of 256, got 384" in str(quantized.refuses(spec._replace(n=384), here()))
    assert quantized.refuses(spec._replace(n=512), here()) is None
    assert "on RDNA 3, a wait is missing" in str(quantized.refuses(spec._replace(activation=None), GFX1100))
