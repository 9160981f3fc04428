"""8- and 4-bit GEMMs on a GPU: errors within bounds, accuracy compared with eager, whole models, and memory.

On an NVIDIA GPU of compute capability 8.9 or higher, the torch tier must serve int8 in every dtype, fp8 in bf16 with
the scales inside the GEMM, and fp8 in fp16 with the scales after it. fp8 in fp32 runs in the eager tier, as do sizes
that the vendor library doesn't support.
"""

from __future__ import annotations

import gc
import math

import pytest
import torch

import hf_rocm
from hf_rocm import ops, options
from hf_rocm.device import describe
from hf_rocm.generation.state import known
from hf_rocm.ops.eight_bit import INT8, fp8_of, quantize_rows
from hf_rocm.ops.four_bit import quantize_groups
from hf_rocm.ops.linear import eager_fused_linear
from hf_rocm.ops.quantized_torch import eager_linear
from hf_rocm.ops.round_rows import round_rows
from hf_rocm.ops.specs.quantized import QuantizedCall
from hf_rocm.ops.triton import quantized as triton
from hf_rocm.weights import quantize as quantizing
from tests.generation.conftest import counted
from tests.gpu.test_gpu import LAYER, large_llama, memory
from tests.ops.test_quantized import random, within_the_bound
from tests.tolerance import assert_as_good_as_eager

pytestmark = pytest.mark.gpu

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = [((1,), 64, 48), ((3,), 128, 4096), ((2, 17), 256, 64), ((300,), 4096, 512), ((0,), 64, 64)]
# Workspaces of the vendor libraries, and fragmentation.
WORKSPACE = 128 * 2**20
EXPECTED = {
    ("fp8", BF16): "_scaled_mm",
    ("fp8", FP16): "_scaled_mm, scaled after",
    ("fp8", FP32): "dequantize, matmul",
    ("int8", BF16): "_int_mm",
    ("int8", FP16): "_int_mm",
    ("int8", FP32): "_int_mm",
}


def format_of(kind):
    return INT8 if kind == "int8" else fp8_of(describe(torch.device("cuda", 0)))


def case(shape, k, n, dtype, format, bias):
    x, weight = random(*shape, k, dtype=dtype).cuda(), random(n, k, dtype=dtype, seed=1).cuda()
    data, scale = quantize_rows(weight, format)
    return x, weight, data, scale.flatten(), random(n, dtype=dtype, seed=2).cuda() if bias else None


def in_full(x, data, scale, bias, dtype):
    tensors = [None if tensor is None else tensor.to(dtype) for tensor in (x, data, scale, bias)]
    return eager_linear(QuantizedCall(*tensors, data.dtype, False))


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("m", "k"), [(1, 63), (37, 4096), (2048, 14336), (5, 16400)])
def test_one_kernel_rounds_rows_as_the_cpu_does(m, k, dtype, kind):
    pytest.importorskip("triton", reason="not run: needs Triton")
    x, format = random(m, k, dtype=dtype), format_of(kind)
    x[0, k // 2] = 1000.0
    if m > 1:
        x[1], x[2] = 0, x[2] * 2.0**-12
    with options.override(probe=False), ops.recording() as routes:
        rows, scale = round_rows(x.cuda(), format)
    assert [(route.operation, route.tier) for route in routes] == [("round_rows", "triton")]
    expected, expected_scale = quantize_rows(x, format)
    assert torch.equal(scale.cpu(), expected_scale)
    assert torch.equal(rows.cpu().view(torch.uint8), expected.view(torch.uint8))
    with options.override(probe=False):
        nan_scale = round_rows(torch.full((2, k), torch.nan, dtype=dtype, device="cuda"), format)[1]
    assert nan_scale.isnan().all()


@pytest.mark.parametrize(("shape", "k", "n"), SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_the_gemm_is_within_the_bound_of_the_format(kind, dtype, bias, shape, k, n):
    format = format_of(kind)
    if format is None:
        pytest.skip("this GPU has no fp8")
    x, weight, data, scale, offset = case(shape, k, n, dtype, format, bias)
    with ops.recording() as routes:
        output = ops.quantized_linear(x, data, scale, offset)
    if torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9):
        assert [route.name for route in routes if route.operation == "quantized_linear"] == [EXPECTED[kind, dtype]]
    assert output.shape == (*shape, n) and output.dtype == dtype
    if x.numel():
        within_the_bound(output, x, weight, offset, format)
        eager = eager_linear(QuantizedCall(x, data, scale, offset, format, False))
        assert_as_good_as_eager(output, eager, in_full(x, data, scale, offset, torch.float64))


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("tier", ["torch", "eager"])
def test_a_nan_affects_only_its_row(tier, kind):
    format = format_of(kind)
    if format is None:
        pytest.skip("this GPU has no fp8")
    x, _, data, scale, bias = case((20,), 64, 32, BF16, format, True)
    clean = x.clone()
    x[1], clean[1] = 0, 0
    x[2, 5], clean[2] = torch.nan, 0
    with options.override(tiers={"linear": tier}):
        output, expected = (ops.quantized_linear(tensor, data, scale, bias) for tensor in (x, clean))
    others = [0, 1, *range(3, 20)]
    assert torch.equal(output[others], expected[others]) and torch.equal(output[1], bias)
    assert output[2].isnan().all() and torch.isfinite(output[others]).all()


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize(("k", "n"), [(63, 64), (64, 33), (8, 8)])
def test_odd_sizes_are_served_by_some_tier(kind, k, n):
    format = format_of(kind)
    if format is None:
        pytest.skip("this GPU has no fp8")
    x, weight, data, scale, bias = case((5,), k, n, BF16, format, True)
    within_the_bound(ops.quantized_linear(x, data, scale, bias), x, weight, bias, format)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_quantised_model_halves_the_memory_and_runs_one_gemm_per_group(kind):
    """Quantising halves the memory of the linear layers of a Llama, and every group of layers runs as one GEMM.

    The logits are as accurate as the eager tier's, and differ from those of the original weights by the reported loss.
    """
    if format_of(kind) is None:
        pytest.skip("this GPU has no fp8")
    torch.manual_seed(0)
    model = hf_rocm.prepare(large_llama("cuda"), force=True)
    ids = torch.arange(100, device="cuda")[None]
    with torch.inference_mode():
        before = model(input_ids=ids, use_cache=False).logits.float()
    weights = [layer for layer in model.modules() if type(layer) is torch.nn.Linear and layer is not model.lm_head]
    linear = sum(weight.weight.nbytes for weight in weights)
    del weights
    allocated, reserved = memory()
    torch.cuda.reset_peak_memory_stats()
    hf_rocm.quantize(model, kind, force=True)
    gc.collect()
    saved = allocated - memory()[0]
    assert 0.49 * linear - WORKSPACE <= saved <= linear / 2
    assert memory()[1] <= reserved - saved + WORKSPACE
    assert torch.cuda.max_memory_allocated() <= allocated + LAYER + WORKSPACE
    # The triton tier does not round x.
    rounded = {"linear": "torch"}
    with torch.inference_mode(), ops.recording() as routes, options.override(tiers=rounded):
        after = model(input_ids=ids, use_cache=False).logits
    shapes = [route.shapes[1] for route in routes if route.operation == "quantized_linear"]
    assert shapes == [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)] * 4
    assert {route.tier for route in routes if route.operation == "quantized_linear"} == {"torch"}
    torch.manual_seed(0)
    reference = hf_rocm.prepare(large_llama("cuda"), force=True)
    with options.override(tiers=rounded):
        loss = hf_rocm.quantization_loss(model, reference, ids=ids)
    del reference
    print(f"\n{kind}: layers off by {model.__dict__[quantizing.REPORT]['error']['mean']:.4f}, {loss}")
    off = (after - before).abs()
    assert math.isclose(loss.mean, off.mean().item(), rel_tol=1e-3)
    assert math.isclose(loss.largest, off.max().item(), rel_tol=1e-3)
    assert 0 < loss.mean < loss.size
    with torch.no_grad(), options.override(tiers={"linear": "eager"}):
        eager = model(input_ids=ids, use_cache=False).logits
        exact = model.double()(input_ids=ids, use_cache=False).logits
    assert_as_good_as_eager(after, eager, exact)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_the_gemm_compiles(kind):
    format = format_of(kind)
    if format is None:
        pytest.skip("this GPU has no fp8")
    x, weight, data, scale, bias = case((40,), 256, 128, BF16, format, True)
    compiled = torch.compile(ops.quantized_linear, fullgraph=True)
    with torch.no_grad():
        within_the_bound(compiled(x, data, scale, bias), x, weight, bias, format)


def test_a_model_moves_to_the_gpu_and_back():
    before = memory()[0]
    model = hf_rocm.quantize(hf_rocm.prepare(large_llama("cuda").cpu(), force=True), "int8", force=True)
    ids = torch.arange(10)[None]
    model.cuda()
    with torch.inference_mode(), ops.recording() as routes:
        output = model(input_ids=ids.cuda(), use_cache=False).logits
    assert [route.shapes[1] for route in routes if route.operation == "quantized_linear"][:1] == [(6144, 4096)]
    assert {route.tier for route in routes if route.operation == "quantized_linear"} == {"triton"}
    assert torch.isfinite(output).all()
    del output
    model.cpu()
    gc.collect()
    # The 8-bit weights took up 900 MB.
    assert memory()[0] - before < WORKSPACE


# N, K: multiples of the tile sizes, the sizes of a small model, and a K that is not a multiple of the kernel's step
SIZES = [(4096, 4096), (896, 4864), (272, 1152)]


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("form", [{}, {"activation": "silu"}, {"norm": True, "residual": True, "bias": True}], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_few_rows_run_the_kernel_of_this_gpu(kind, dtype, form, n, k):
    weight = (random(n, k, dtype=dtype, seed=1) * k**-0.5).cuda()
    if kind == "int4":
        data, scale = quantize_groups(weight, 128)
    else:
        data, scale = quantize_rows(weight, format_of(kind))
        scale = scale.flatten()
    bias = random(n, dtype=dtype, seed=2).cuda() if "bias" in form else None
    activation = form.get("activation")
    norm = random(k, dtype=dtype, seed=3).cuda() if "norm" in form else None
    for m in (1, 2, 8, 17, 64):
        x = random(m, k, dtype=dtype, seed=m).cuda()
        residual = random(m, n, dtype=dtype, seed=4).cuda() if "residual" in form else None
        with ops.recording() as routes:
            output = ops.quantized_linear(
                x,
                data,
                scale,
                bias,
                round_input=False,
                norm=None if norm is None else ops.Norm(norm, 1e-5),
                activation=activation,
                residual=residual,
            )
        assert [(route.tier, route.name) for route in routes] == [("triton", "few_rows")]
        call = QuantizedCall(
            x, data, scale, bias, data.dtype, False, False, norm, residual, 1e-5, activation=activation
        )
        results = []
        for compute_dtype in (dtype, FP64):
            tensors = [None if tensor is None else tensor.to(compute_dtype) for tensor in (x, bias, norm, residual)]
            wide_x, wide_bias, wide_norm, wide_residual = tensors
            results.append(
                eager_fused_linear(
                    wide_x,
                    call.dequantized(compute_dtype),
                    wide_bias,
                    wide_norm,
                    wide_residual,
                    1e-5,
                    False,
                    activation,
                )
            )
        assert_as_good_as_eager(output, *results)


@pytest.mark.parametrize(("n", "k"), [*SIZES, (40, 128)])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "int4-g32"])
def test_many_rows_use_a_dequantised_weight(kind, dtype, n, k):
    """The weight is bitwise equal to PyTorch's result, and the GEMM is as accurate as an eager layer."""
    weight = (random(n, k, dtype=dtype, seed=1) * k**-0.5).cuda()
    weight[1] = 0
    weight[2] *= 2.0**-8
    if kind.startswith("int4"):
        data, scale = quantize_groups(weight, 32 if kind == "int4-g32" else 128)
    else:
        data, scale = quantize_rows(weight, format_of(kind))
        scale = scale.flatten().float()
    x, bias = random(65, k, dtype=dtype).cuda(), random(n, dtype=dtype, seed=2).cuda()
    call = QuantizedCall(x, data, scale, bias, data.dtype, False, False)
    assert torch.equal(triton._dequantized(data, scale, dtype), call.dequantized(dtype))
    with ops.recording() as routes:
        output = ops.quantized_linear(x, data, scale, bias, round_input=False)
    assert [(route.tier, route.name) for route in routes] == [("triton", triton.DEQUANTIZE)]
    results = []
    for compute_dtype in (dtype, FP64):
        wide_x, wide_bias = x.to(compute_dtype), bias.to(compute_dtype)
        results.append(torch.nn.functional.linear(wide_x, call.dequantized(compute_dtype), wide_bias))
    assert_as_good_as_eager(output, *results)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "mxfp4"])
def test_a_prompt_is_not_rounded(kind):
    """In a whole model, GEMMs with 100 rows dequantise the weights instead of rounding x."""
    torch.manual_seed(0)
    model = hf_rocm.quantize(hf_rocm.prepare(large_llama("cuda"), force=True), kind, force=True)
    ids = torch.arange(100, device="cuda")[None]
    with torch.inference_mode(), ops.recording() as routes:
        logits = model(input_ids=ids, use_cache=False).logits
    assert {route.name for route in routes if route.operation == "quantized_linear"} == {triton.DEQUANTIZE}
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "mxfp4"])
def test_a_recorded_step_reads_the_packed_weights(kind):
    """Recorded and uncaptured steps choose equal tokens, unless the two largest logits are almost equal.

    In uncaptured steps, another kernel computes attention and rounds differently. 8-bit weights take half the memory of
    bf16 weights, and 4-bit weights about a quarter.
    """
    torch.manual_seed(0)
    model = hf_rocm.prepare(large_llama("cuda"), force=True)
    linear = sum(
        layer.weight.nbytes
        for layer in model.modules()
        if type(layer) is torch.nn.Linear and layer is not model.lm_head
    )
    gc.collect()
    allocated = memory()[0]
    hf_rocm.quantize(model, kind, force=True)
    gc.collect()
    packed = {"int4": (4 + 16 / 128) / 16, "mxfp4": 4.25 / 16}.get(kind, 0.5)
    assert memory()[0] <= allocated - linear * (1 - packed * 1.03) + WORKSPACE
    ids = torch.arange(20, device="cuda")[None]
    arguments = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    logits = {"output_logits": True, "return_dict_in_generate": True}
    with ops.recording() as routes:
        plain = model.generate(ids, disable_compile=True, **logits, **arguments)
    names = {route.name for route in routes if route.operation == "quantized_linear"}
    assert names == {"few_rows"}
    before = counted(model)
    recorded = model.generate(ids, **arguments)
    assert counted(model)[1] > before[1] + 4 and known(model).disabled is None
    for column, step in enumerate(plain.logits, start=ids.shape[1]):
        token, expected = recorded[0, column], plain.sequences[0, column]
        # All later tokens may differ.
        if token != expected:
            assert step[0, expected] - step[0, token] <= 2**-5 * step.abs().max()
            break
