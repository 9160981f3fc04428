"""quantized_linear with few rows in the Triton kernels, compared with float64: 8-bit weights and unrounded x."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.device import Device
from hf_rocm.errors import OptionError, TierUnavailable
from hf_rocm.ops.eight_bit import FP8, FP8_FNUZ, INT8, quantize_rows
from hf_rocm.ops.linear import eager_fused_linear
from hf_rocm.ops.quantized import keeps_input
from hf_rocm.ops.specs.quantized import QuantizedCall, QuantizedSpec
from hf_rocm.ops.triton import quantized
from tests.amdgcn import suite
from tests.tolerance import assert_as_good_as_eager
from tests.triton.routed import compiled_once, here, random, routed

BF16, FP16 = torch.bfloat16, torch.float16

# Triton's interpreter does not support the fp8 type of MI300
FORMATS = (FP8, INT8) if suite.gpu() is None else (FP8, FP8_FNUZ, INT8)

every_format = pytest.mark.parametrize("format", FORMATS, ids=str)


def rounded(weight: torch.Tensor, format: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    data, scale = quantize_rows(weight, format)
    return data, scale.flatten().float()


def exact(call: QuantizedCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the results of eager layers with the dequantised weight, in x's dtype and in float64."""
    results = []
    for dtype in (call.x.dtype, torch.float64):
        x, bias, norm, residual = (
            None if tensor is None else tensor.to(dtype)
            for tensor in (call.x, call.bias, call.norm_weight, call.residual)
        )
        weight = call.dequantized(dtype)
        results.append(eager_fused_linear(x, weight, bias, norm, residual, call.eps, call.one_plus, call.activation))
    return results[0], results[1]


def check(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None, **kwargs: Any):
    """Compare one call with eager layers. In machine code, also check that a NaN affects only its own row or column.

    In machine code, a call with one scale per row is repeated with so many columns that the loop has several
    iterations. If it has no further arguments, the smallest numbers of the weight's format are also checked.
    """
    output = check_once(x, weight, scale, bias, **kwargs)
    if suite.gpu() is not None:
        assert_independent(output, x, weight, scale, bias, round_input=False, **kwargs)
        plain = scale.dim() == 1 and all(value is None for value in kwargs.values())
        if plain:
            check_small_codes(x, weight, bias)
        if scale.dim() == 1:
            copies = range(odd_factor(x.shape[-1]))
            wide = torch.cat([x * (-1.0) ** i * 2.0 ** -(i % 3) for i in copies], -1)
            if norm := kwargs.get("norm"):
                kwargs["norm"] = norm._replace(weight=norm.weight.repeat(len(copies)))
            arguments = (wide, torch.cat([weight.roll(i, 0) for i in copies], -1), scale, bias)
            check_once(*arguments, **kwargs)
            if plain:
                check_small_codes(wide, arguments[1], bias)
    return output


def odd_factor(k: int) -> int:
    """Returns an odd factor for K that results in at least two blocks of columns, and in an almost full last block."""
    factors = [count for count in range(3, 1800 // k + 1, 2) if count * k > 1100] or [3]
    return max(factors, key=lambda count: count * k % 512)


def check_small_codes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Check the smallest numbers of a format, which conversions handle separately. Their sums are exact."""
    codes = torch.randint(8, weight.shape, generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    signs = torch.randint(2, weight.shape, generator=torch.Generator().manual_seed(4)).bool() & (codes > 0)
    small = torch.where(signs, -codes if weight.dtype == INT8 else codes + 128, codes).view(weight.dtype)
    zeros = None if bias is None else torch.zeros_like(bias)
    output = routed("quantized_linear", torch.ones_like(x), small, torch.ones(len(small)), zeros, round_input=False)
    expected = small.float().sum(1).to(x.dtype)
    assert torch.equal(output, expected.expand_as(output))


def check_once(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, **kwargs: Any):
    output = routed("quantized_linear", x, weight, scale, bias, round_input=False, **kwargs)
    as_good_as_eager(output, x, weight, scale, bias, **kwargs)
    return output


def assert_independent(
    output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    **kwargs: Any,
) -> None:
    """Check that NaN in every third row or scale affects only the corresponding rows or columns of the output."""
    rows, columns = torch.arange(x.numel() // x.shape[-1]).view(x.shape[:-1]), torch.arange(output.shape[-1])
    for first in range(3):
        mask = rows % 3 == first
        nan = routed("quantized_linear", x.masked_fill(mask[..., None], torch.nan), weight, scale, bias, **kwargs)
        assert nan[mask].isnan().all() and torch.equal(nan[~mask], output[~mask])
        # The scales of MXFP4 and of double quantisation are uint8, which can't be filled with NaN.
        if scale.dtype == torch.uint8:
            continue
        mask = columns % 3 == first
        filled = (mask.repeat(2) if kwargs.get("activation") else mask).view(-1, *[1] * (scale.dim() - 1))
        nan = routed("quantized_linear", x, weight, scale.masked_fill(filled, torch.nan), bias, **kwargs)
        assert nan[..., mask].isnan().all() and torch.equal(nan[..., ~mask], output[..., ~mask])


def as_good_as_eager(
    output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> None:
    norm = kwargs.get("norm") or ops.Norm(None, 0.0)  # type: ignore[arg-type]
    call = QuantizedCall(x, weight, scale, bias, weight.dtype, False, False, norm.weight, kwargs.get("residual"))
    call = call._replace(eps=norm.eps, one_plus=norm.one_plus, zeros=kwargs.get("zeros"))
    call = call._replace(code=kwargs.get("code"), nested=kwargs.get("nested"))
    eager, wide = exact(call._replace(activation=kwargs.get("activation")))
    assert_as_good_as_eager(output, eager, wide)


@every_format
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 16, 17, 33, 64])
def test_every_class_of_rows(m, format):
    x, weight = random(m, 80, dtype=BF16), random(21, 80, dtype=BF16, seed=1)
    check(x, *rounded(weight, format))


@every_format
def test_a_residual_and_an_uneven_k_with_many_rows(format):
    x, weight = random(17, 1100, dtype=BF16), random(21, 1100, dtype=BF16, seed=1)
    residual = random(17, 21, dtype=BF16, seed=3)
    if format is not INT8 and (suite.arch() or "").startswith("gfx11"):
        with pytest.raises(TierUnavailable, match="on RDNA 3, a wait is missing"):
            check_once(x, *rounded(weight, format), None, residual=residual)
    else:
        check(x, *rounded(weight, format), random(21, dtype=BF16, seed=2), residual=residual)


@every_format
@pytest.mark.parametrize("units", [0, 1000])
@pytest.mark.parametrize("m", [17, 64])
def test_programs_split_k_on_a_gpu_with_many_units(m, units, format, monkeypatch):
    monkeypatch.setattr(quantized, "units", lambda device: units)
    x, weight = random(m, 1536, dtype=BF16), random(21, 1536, dtype=BF16, seed=1)
    residual = random(m, 21, dtype=BF16, seed=3)
    check(x, *rounded(weight, format), random(21, dtype=BF16, seed=2), residual=residual)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@every_format
@pytest.mark.parametrize(
    ("shape", "n"), [((1, 16), 16), ((1, 1, 63), 37), ((2, 131), 20), ((3, 5, 40), 33), ((1, 2100), 18)], ids=str
)
def test_odd_sizes(shape, n, format, dtype):
    x, weight = random(*shape, dtype=dtype), random(n, shape[-1], dtype=dtype, seed=1)
    check(x, *rounded(weight, format), random(n, dtype=dtype, seed=2))


FORMS: list[dict[str, Any]] = [
    {"norm": True},
    {"residual": True},
    {"activation": "silu"},
    {"activation": "gelu_tanh", "norm": True, "residual": True, "bias": True},
]


@every_format
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("m", [1, 5])
def test_norm_gate_and_residual_are_fused(m, form, format):
    n, k = 38, 67
    if "activation" in form and (suite.arch() or "").startswith("gfx11"):
        tensors = random(1, m, k, dtype=BF16), *rounded(random(n, k, dtype=BF16), format)
        with pytest.raises(TierUnavailable, match="on RDNA 3, a wait is missing"):
            routed("quantized_linear", *tensors, round_input=False, activation=form["activation"])
        return
    columns = n // 2 if "activation" in form else n
    x, weight = random(1, m, k, dtype=BF16), random(n, k, dtype=BF16, seed=1) * k**-0.5
    kwargs: dict[str, Any] = {"activation": form.get("activation")}
    if "norm" in form:
        kwargs["norm"] = ops.Norm(random(k, dtype=BF16, seed=3), 1e-5, True)
    if "residual" in form:
        kwargs["residual"] = random(1, m, columns, dtype=BF16, seed=4)
    check(x, *rounded(weight, format), random(n, dtype=BF16, seed=2) if "bias" in form else None, **kwargs)


@every_format
@pytest.mark.parametrize("m", [1, 4])
def test_zeros_extremes_and_nan_affect_only_their_row(m, format):
    weight = random(24, 64, dtype=BF16, seed=1)
    weight[3] = 0
    weight[4] *= 2.0**-100
    weight[5] *= 2.0**100
    x = random(m, 64, dtype=BF16)
    data, scale = rounded(weight, format)
    output = check(x, data, scale)
    assert (output[:, 3] == 0).all()
    scale[7] = torch.nan
    x[-1, 0] = torch.inf
    output = routed("quantized_linear", x, data, scale, round_input=False)
    assert output[:, 7].isnan().all() and not output[-1].isfinite()[data[:, 0].float() != 0].any()
    assert torch.isfinite(output[:-1, :7]).all()


def test_every_value_of_a_format_is_decoded():
    """With a single nonzero column of x, the results are the numbers in this column of the weight."""
    for format, numbers in ((INT8, range(-127, 128)), (FP8, [i for i in range(256) if i & 0x7F != 0x7F])):
        bits = torch.tensor(list(numbers), dtype=torch.int64).to(torch.uint8)
        for k in (16,) if suite.gpu() is None else (16, 1040):
            weight = torch.stack([bits.roll(7 * column, 0) for column in range(k)], 1).view(format)
            for column in (5,) if suite.gpu() is None else (0, 5, 6, 15, k - 9):
                for m, dtype in product((1, 2), (BF16,) if suite.gpu() is None else (BF16, FP16)):
                    x = torch.zeros(m, k, dtype=dtype)
                    x[:, column] = 1
                    output = routed("quantized_linear", x, weight, torch.ones(len(bits)), round_input=False)
                    assert torch.equal(output, weight[:, column].to(dtype).expand(m, -1))
            # Select two columns, one per row of x.
            for first in range(0, 0 if suite.gpu() is None else 16, 2):
                columns = torch.tensor([first, first + 1])
                x = torch.zeros(2, k, dtype=BF16).scatter_(1, columns[:, None], 1)
                output = routed("quantized_linear", x, weight, torch.ones(len(bits)), round_input=False)
                assert torch.equal(output, weight[:, columns].to(BF16).T)


def test_an_empty_batch_and_a_compiled_graph_are_supported():
    x, weight = random(2, 1600, dtype=BF16), random(32, 1600, dtype=BF16)
    data, scale = rounded(weight, INT8)
    assert routed("quantized_linear", x[:0], data, scale, round_input=False).shape == (0, 32)

    def function(x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return ops.quantized_linear(x, data, scale, round_input=False)

    assert compiled_once(function, x, data, scale)


def test_few_rows_are_converted_in_registers():
    x, weight = random(65, 1600, dtype=BF16), random(32, 1600, dtype=BF16)
    data, scale = rounded(weight, INT8)
    with ops.recording() as routes:
        ops.quantized_linear(x, data, scale, round_input=False)
        ops.quantized_linear(x[:64], data, scale, round_input=False)
    assert [(route.tier, route.name) for route in routes] == [
        ("triton", "dequantize, F.linear"),
        ("triton", "few_rows"),
    ]
    assert keeps_input(x, data, scale, None, False) and keeps_input(x[:2], data, scale, None, False)
    with options.override(tiers={"linear": "torch"}):
        assert not keeps_input(x, data, scale, None, False) and not keeps_input(x[:2], data, scale, None, False)


SPEC = QuantizedSpec(
    dtype=BF16,
    format=INT8,
    device=torch.device("cpu"),
    n=64,
    k=64,
    bias_dtype=None,
    shuffled=False,
    round_input=False,
    rows=1,
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"round_input": True}, "don't round x"),
        ({"dtype": torch.float32}, "not torch.float32"),
        ({"bias_dtype": torch.float32}, "one dtype"),
        ({"shuffled": True}, "plain order"),
        ({"n": 8}, "at least 16"),
        ({"rows": 0}, "M > 64"),
        ({"activation": "silu", "n": 65}, "even N"),
        ({"format": torch.int32, "group": 32, "k": 96}, "multiple of 128"),
    ],
    ids=str,
)
def test_unsupported_calls_are_refused(change, reason):
    assert reason in str(quantized.refuses(SPEC._replace(**change), here()))
    assert quantized.refuses(SPEC, here()) is None


def test_fp8_is_refused_on_older_nvidia_gpus(monkeypatch):
    nvidia = Device("cuda", rocm=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert "capability 8.9" in str(quantized.format_refuses(SPEC._replace(format=FP8), nvidia))
    assert quantized.format_refuses(SPEC, nvidia) is None
    assert "FNUZ" in str(quantized.format_refuses(SPEC._replace(format=FP8_FNUZ), nvidia))


def test_an_unknown_activation_is_an_error():
    data, scale = rounded(random(32, 64, dtype=BF16), INT8)
    with pytest.raises(OptionError, match="mish"):
        ops.quantized_linear(random(1, 64, dtype=BF16), data, scale, activation="mish")
