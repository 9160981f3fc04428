"""quantized_linear: errors within bounds in the torch and eager tiers, rows of zeros and NaN, and refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_rocm import ops, options
from hf_rocm.device import Device
from hf_rocm.errors import OptionError, TierUnavailable
from hf_rocm.ops import probe, quantized_torch, registry
from hf_rocm.ops.eight_bit import (
    FP8,
    FP8_FNUZ,
    INT8,
    dequantize_rows,
    fp8_of,
    largest,
    quantize_rows,
    shuffle_rows,
    unshuffle_rows,
)
from hf_rocm.ops.four_bit import quantize_groups
from hf_rocm.ops.pointwise import eager_rms_norm
from hf_rocm.ops.quantized_torch import eager_linear
from hf_rocm.ops.specs.quantized import QuantizedCall, QuantizedSpec
from tests import eight_bit
from tests.tolerance import assert_as_good_as_eager

BF16 = torch.bfloat16
DTYPES = [torch.float32, BF16, torch.float16]
SHAPES = [((1, 16), 16), ((3, 63), 5), ((2, 5, 64), 48), ((130,), 33), ((17, 24), 1)]

every_format = pytest.mark.parametrize("format", eight_bit.FORMATS, ids=str)
every_tier = pytest.mark.parametrize("tier", ["torch", "eager"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(*shape, dtype=BF16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors(shape, n, dtype, bias):
    return random(*shape, dtype=dtype), random(n, shape[-1], dtype=dtype, seed=1), random(n, seed=2) if bias else None


def rounded(weight, format):
    data, scale = quantize_rows(weight, format)
    return data, scale.flatten().float()


@pytest.fixture(autouse=True)
def checked():
    eight_bit.check_all()


def routed(tier, x, data, scale, bias=None, **further):
    """Run quantized_linear in this tier.

    If PyTorch has no GEMM for these dtypes, the torch tier must refuse the call, and the eager tier runs it.
    """
    name = eight_bit.gemm_name(data.dtype, x.dtype) if tier == "torch" else eight_bit.EAGER
    with options.override(tiers={"linear": tier}), ops.recording() as routes:
        if name is None:
            with pytest.raises(TierUnavailable, match="its check failed"):
                ops.quantized_linear(x, data, scale, bias, **further)
        else:
            output = ops.quantized_linear(x, data, scale, bias, **further)
    if name is None:
        assert not routes
        with ops.recording() as routes:
            output = ops.quantized_linear(x, data, scale, bias, **further)
        tier, name = "eager", eight_bit.EAGER
    assert [(route.operation, route.tier, route.name) for route in routes] == [("quantized_linear", tier, name)]
    return output


def within_the_bound(output, x, weight, bias, format):
    """Check that no element differs from the product of the unrounded numbers by more than the rounding errors.

    The bound is (|x| + e_x)(|w| + e_w) - |x||w|, summed over K, where e is half a step of the format, plus the errors
    of rounding the product and its sum with the bias to the output's dtype.
    """
    rows, wide = x.reshape(-1, x.shape[-1]).double(), weight.double()
    error_x, error_w = eight_bit.rounding_error(rows, format), eight_bit.rounding_error(wide, format)
    bound = rows.abs() @ error_w.t() + error_x @ wide.abs().t() + error_x @ error_w.t()
    exact = rows @ wide.t()
    expected = exact if bias is None else exact + bias.double()
    bound += torch.finfo(output.dtype).eps * (exact.abs() + expected.abs() + bound)
    assert torch.isfinite(output).all()
    error = (output.reshape(expected.shape).double() - expected).abs()
    assert (error <= bound).all(), f"off by {(error / bound).max():.2f} times the bound"
    # Some rounding must have occurred.
    assert (error > 0).any() or not error.numel()


@pytest.mark.parametrize(("shape", "n"), SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@every_dtype
@every_tier
@every_format
def test_results_are_within_the_bound_of_the_format(format, tier, dtype, bias, shape, n):
    x, weight, offset = tensors(shape, n, dtype, bias)
    data, scale = rounded(weight, format)
    output = routed(tier, x, data, scale, offset)
    assert output.shape == (*shape[:-1], n) and output.dtype == dtype
    within_the_bound(output, x, weight, offset, format)
    doubled = (x.double(), data.double(), scale.double(), None if offset is None else offset.double())
    expected = eager_linear(QuantizedCall(*doubled, format, False))
    assert_as_good_as_eager(output, eager_linear(QuantizedCall(x, data, scale, offset, format, False)), expected)


def refuse(*_, **__):
    raise RuntimeError("could not create a primitive descriptor for a matmul primitive")


def scaled(rows, weight, *, scale_a, scale_b, out_dtype):
    return (rows.float() @ weight.float() * scale_a * scale_b).to(out_dtype)


def integer_gemm(rows, weight):
    return rows.int() @ weight.int()


def scaled_inside_alone(rows, weight, *, scale_a, scale_b, out_dtype):
    """Simulate oneDNN on a CPU with AMX, which refuses FP8_FNUZ if each tensor has a single scale."""
    if scale_a.numel() == scale_b.numel() == 1 and rows.dtype == FP8_FNUZ:
        refuse()
    return scaled(rows, weight, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype)


# Possible behaviours of PyTorch's two private GEMMs on a CPU, and whether a format is then supported for a dtype
CPUS = {
    "all": (scaled, integer_gemm, lambda format, dtype: True),
    "none": (refuse, refuse, lambda format, dtype: False),
    "scaled inside alone": (
        scaled_inside_alone,
        integer_gemm,
        lambda format, dtype: format != FP8_FNUZ or dtype == BF16,
    ),
}


@pytest.fixture(params=CPUS)
def supports(request, monkeypatch):
    """Simulate another CPU. Yields a function that returns whether it supports a format for a dtype."""
    fp8, int8, supports = CPUS[request.param]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_scaled_mm", fp8)
        patch.setattr(torch, "_int_mm", int8)
        probe.forget()
        registry.forget_choices()
        eight_bit.check_all()
        yield supports
    probe.forget()
    registry.forget_choices()


@every_dtype
@every_format
def test_the_route_depends_on_the_gemms_that_a_cpu_supports(format, dtype, supports):
    """The other tests cover only the CPU of this machine. This test covers every branch."""
    x, weight, bias = tensors((5, 64), 16, dtype, True)
    assert (eight_bit.gemm_name(format, dtype) is not None) == supports(format, dtype)
    within_the_bound(routed("torch", x, *rounded(weight, format), bias), x, weight, bias, format)


def test_a_refusal_of_this_cpu_causes_one_warning(monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    probe.forget()
    registry.forget_choices()
    x, weight, _ = tensors((3, 48), 16, torch.float32, False)
    data, scale = rounded(weight, FP8_FNUZ)
    with pytest.warns(RuntimeWarning, match="won't use torch's _scaled_mm.* in this process: .*primitive descriptor"):
        ops.quantized_linear(x, data, scale)
    registry.forget_choices()
    # A second warning would be an error.
    ops.quantized_linear(x, data, scale)
    probe.forget()
    registry.forget_choices()


def test_fp64_is_served_by_the_eager_tier():
    x, weight, _ = tensors((3, 32), 8, torch.float64, False)
    within_the_bound(routed("eager", x, *rounded(weight, INT8)), x, weight, None, INT8)


@every_tier
@every_format
@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)], ids=str)
def test_an_empty_batch_returns_an_empty_output(format, tier, shape):
    data, scale = rounded(random(8, 16), format)
    assert routed(tier, random(*shape), data, scale, random(8)).shape == (*shape[:-1], 8)


@every_tier
@every_format
@every_dtype
def test_zeros_tiny_numbers_and_nan_affect_only_their_row(format, tier, dtype):
    weight = random(8, 32, dtype=dtype, seed=1)
    weight[3] = 0
    x = random(5, 32, dtype=dtype)
    x[1] = 0
    x[2, 7] = torch.nan
    x[3, 7] = torch.inf
    x[4] *= torch.finfo(dtype).tiny
    data, scale = rounded(weight, format)
    bias = random(8, seed=2)
    output = routed(tier, x, data, scale, bias)
    assert torch.isfinite(output[[0, 1, 4]]).all()
    assert torch.equal(output[1], bias.to(dtype)) and torch.equal(output[:2, 3], bias[3].to(dtype).expand(2))
    assert output[2].isnan().all() and not torch.isfinite(output[3]).any()
    clean = x.clone()
    clean[2:4] = 0
    # No other row is affected.
    assert torch.equal(routed(tier, clean, data, scale, bias)[[0, 1, 4]], output[[0, 1, 4]])


@every_tier
def test_columns_of_x_are_reordered_after_the_norm(tier):
    x, weight = random(2, 3, 64), random(8, 64, seed=1)
    norm, order = (
        ops.Norm(random(64, seed=2), 1e-5, False),
        torch.randperm(64, generator=torch.Generator().manual_seed(3)),
    )
    with options.override(tiers={"linear": tier}):
        for data, scale in (quantize_groups(weight, 32), rounded(weight, INT8)):
            normed = ops.rms_norm(x, norm.weight, eps=norm.eps) if tier == "torch" else eager_rms_norm(x, *norm)
            expected = ops.quantized_linear(normed[..., order], data, scale)
            assert torch.equal(ops.quantized_linear(x, data, scale, norm=norm, order=order), expected)


@every_tier
@every_format
def test_a_weight_row_with_nan_makes_one_output_nan(format, tier):
    weight = random(8, 32, seed=1)
    weight[5, 0] = torch.nan
    output = routed(tier, random(3, 32), *rounded(weight, format))
    assert output.isnan().sum(0).tolist() == [0, 0, 0, 0, 0, 3, 0, 0]


@every_format
@pytest.mark.parametrize("factor", [2.0**-100, 1.0, 2.0**100])
def test_rows_are_rounded_to_the_nearest_number(format, factor):
    """The largest magnitude in a row becomes the format's largest number. Representable values are kept."""
    x = random(64, 33, dtype=torch.float64) * factor
    rows, scale = quantize_rows(x, format)
    assert rows.dtype == format and scale.shape == (64, 1)
    back = rows.double() * scale
    assert ((back - x).abs() <= eight_bit.rounding_error(x, format) * (1 + 1e-6)).all()
    assert torch.equal(rows.double().abs().amax(-1), torch.full((64,), largest(format), dtype=torch.float64))
    again, _ = quantize_rows(back, format)
    assert torch.equal(again.double(), rows.double())
    assert torch.equal(dequantize_rows(rows, scale.flatten(), torch.float64), back)


@every_format
@given(n=st.integers(1, 3), k=st.integers(1, 4))
def test_the_shuffled_order_has_an_inverse(format, n, k):
    rows, _ = quantize_rows(random(16 * n, 32 * k), format)
    shuffled = shuffle_rows(rows)
    assert torch.equal(unshuffle_rows(shuffled).double(), rows.double())
    part = shuffle_rows(rows[:16])
    # Each block of 16 rows is shuffled separately.
    assert torch.equal(shuffled[:16].double(), part.double())


@every_tier
@every_format
def test_a_shuffled_weight_gives_the_same_results(format, tier):
    x, weight, bias = tensors((5, 64), 32, BF16, True)
    data, scale = rounded(weight, format)
    expected = routed(tier, x, data, scale, bias)
    assert torch.equal(routed(tier, x, shuffle_rows(data), scale, bias, shuffled=True), expected)


@every_format
@pytest.mark.parametrize("rows", [1, 6])
def test_it_compiles_into_one_graph(format, rows):
    x, weight, bias = tensors((rows, 32), 16, BF16, True)
    data, scale = rounded(weight, format)
    compiled = torch.compile(ops.quantized_linear, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x, data, scale, bias), ops.quantized_linear(x, data, scale, bias))


def test_gradients_are_refused_with_a_reason():
    data, scale = rounded(random(8, 16), INT8)
    x = random(2, 16).requires_grad_()
    with pytest.raises(OptionError, match="quantised layers don't support gradients"):
        ops.quantized_linear(x, data, scale)
    with torch.no_grad():
        assert ops.quantized_linear(x, data, scale).shape == (2, 8)


SPEC = QuantizedSpec(dtype=BF16, format=FP8, device=torch.device("cpu"), n=64, k=64, bias_dtype=None, shuffled=False)
ROCM = Device("cuda", rocm=True, arch="gfx950")
PLAIN, AFTER, WHOLE = (
    next(
        implementation
        for implementation in registry.operations()["quantized_linear"].implementations
        if implementation.name == name
    ).refuses
    for name in ("_scaled_mm", "_scaled_mm, scaled after", "_int_mm")
)


@pytest.mark.parametrize(
    ("refuses", "changes", "sentence"),
    [
        (PLAIN, {"format": INT8}, "_scaled_mm supports only fp8"),
        (PLAIN, {"dtype": torch.float16}, "with a scale for each row, _scaled_mm returns bf16, not torch.float16"),
        (PLAIN, {"n": 40}, "on a GPU, _scaled_mm needs N and K to be multiples of 16, got 40 × 64"),
        (AFTER, {"dtype": torch.float32}, "on a GPU, _scaled_mm accumulates with fewer bits than fp32"),
        (AFTER, {"dtype": torch.float64}, "_scaled_mm returns at most fp32, not torch.float64"),
        (WHOLE, {}, "_int_mm supports only int8"),
        (WHOLE, {"format": INT8, "k": 60}, "on a GPU, _int_mm needs N and K to be multiples of 8, got 64 × 60"),
        (WHOLE, {"format": INT8, "dtype": torch.float64}, "the scales of _int_mm are applied in fp32"),
    ],
)
def test_the_torch_tier_refuses_unsupported_calls(refuses, changes, sentence):
    assert refuses(SPEC._replace(**changes), ROCM) == sentence


def test_an_old_nvidia_gpu_has_no_fp8(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    device = Device("cuda", rocm=False)
    assert PLAIN(SPEC, device) == "fp8 GEMMs need compute capability 8.9 or higher, got 8.0"
    assert WHOLE(SPEC._replace(format=INT8), device) is None


@pytest.mark.parametrize(
    ("device", "format"),
    [
        (Device("cuda", rocm=True, arch="gfx942"), FP8_FNUZ),
        (Device("cuda", rocm=True, arch="gfx950"), FP8),
        (Device("cuda", rocm=True, arch="gfx90a"), None),
        (Device("cuda", rocm=True, arch="gfx1100"), None),
        (Device("cuda", rocm=False), FP8),
        (Device("cpu", rocm=False), FP8),
    ],
)
def test_the_fp8_format_depends_on_the_device(device, format):
    assert fp8_of(device) == format


def test_a_wrong_gemm_of_this_pytorch_is_detected(monkeypatch):
    monkeypatch.setattr(torch, "_int_mm", lambda rows, columns: integer_gemm(rows, columns) + 1000)
    probe.forget()
    registry.forget_choices()
    x, weight, _ = tensors((3, 48), 16, BF16, False)
    with (
        pytest.warns(
            RuntimeWarning, match="won't use torch's _int_mm for bfloat16 and int8 in this process: .*wrong by"
        ),
        ops.recording() as routes,
    ):
        output = ops.quantized_linear(x, *rounded(weight, INT8))
    assert [(route.tier, route.name) for route in routes] == [("eager", eight_bit.EAGER)]
    within_the_bound(output, x, weight, None, INT8)
    probe.forget()
    registry.forget_choices()


def test_few_rows_are_padded_on_a_gpu(monkeypatch):
    """On a GPU, _int_mm needs more than 16 rows: check the size of the padded input, and the result."""
    requests = []
    monkeypatch.setattr(
        torch, "_int_mm", lambda rows, columns: requests.append(len(rows)) or integer_gemm(rows, columns)
    )

    class OnGpu(torch.Tensor):
        is_cuda = True

    x, weight, _ = tensors((3, 32), 16, BF16, False)
    data, scale = rounded(weight, INT8)
    output = quantized_torch.int_mm(QuantizedCall(x.as_subclass(OnGpu), data, scale, None, INT8, False))
    assert requests == [32] and output.shape == (3, 16)
    within_the_bound(output.as_subclass(torch.Tensor), x, weight, None, INT8)
