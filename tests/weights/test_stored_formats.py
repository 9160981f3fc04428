"""Every format of quantised checkpoints on single layers: any bits, any scales, odd sizes, and the bytes afterwards."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from hf_rocm.weights.encode_stored import encode
from hf_rocm.weights.kinds import import_all
from hf_rocm.weights.stored import TensorInfo, parsers
from hf_rocm.weights.stored_linear import EncodedLinear, StoredLinear
from tests.tolerance import assert_as_good_as_eager
from tests.weights import stored_checkpoints as checkpoints

each_case = pytest.mark.parametrize("case", checkpoints.CASES, ids=str)


def layer_of(case, tensors, n, k, dtype=torch.float32):
    import_all()
    infos = {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    linear = nn.Linear(k, n, bias=False, device="meta", dtype=dtype)
    layer = StoredLinear(linear, parsers()[case.config["quant_method"]](case.config), infos, biased=False)
    for name, tensor in tensors.items():
        layer._buffers[name] = tensor.contiguous()
    return layer


def made(case, n, k, dtype=torch.float32):
    torch.manual_seed(n + k)
    tensors, exact = case.write(torch.randn(n, k) * 0.1)
    return layer_of(case, tensors, n, k, dtype), exact


def encoded(layer):
    """The same numbers for the kernels, in a model of one layer."""
    model = nn.Sequential(layer)
    encode(model)
    assert type(model[0]) is EncodedLinear
    return model[0]


def raw_of(layer):
    return {name: checkpoints.raw(tensor) for name, tensor in layer.state_dict().items()}


# N and K: one tile, odd multiples of 16, K of one run and of several
@each_case
@pytest.mark.parametrize(("n", "k"), [(16, 128), (48, 384), (112, 1152)])
def test_products(case, n, k):
    layer, exact = made(case, n, k)
    expected = raw_of(layer)
    results = {}
    for m in (1, 2, 63, 65):
        x = torch.randn(m, k)
        results[m] = x, layer(x), x @ exact.float().t(), x.double() @ exact.t()
        assert_as_good_as_eager(*results[m][1:])
    new = encoded(layer)
    assert torch.equal(new.weight, exact.float())
    for m, (x, _, eager, wide) in results.items():
        rounded = new.quantized.rounds
        actual = new.quantized(x)
        if rounded:  # one scale for each row of x
            step = x.abs().amax(1, keepdim=True) / (127 if new.quantized.data.dtype == torch.int8 else 16)
            bound = 0.51 * step.double() * exact.abs().sum(1)
            assert ((actual.double() - wide).abs() <= bound + 1e-4).all(), m
        else:
            assert_as_good_as_eager(actual, eager, wide)
    assert raw_of(new) == expected and raw_of(new.original()) == expected


@each_case
def test_any_bits_come_back(case):
    """Every pattern in every tensor, also what no library writes: -128, NaN of fp8, negative and infinite scales."""
    layer, _ = made(case, 64, 256)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in layer.tensors().items():
        if name not in ("weight_shape", "g_idx"):
            bits = tensor.flatten().view(torch.uint8)
            bits.copy_(torch.randint(0, 256, bits.shape, generator=generator))
    expected, values = raw_of(layer), layer.dequantized(torch.float32)
    new = encoded(layer)
    assert raw_of(new) == expected
    assert torch.equal(new.weight.isnan(), values.isnan())
    assert torch.equal(new.weight.nan_to_num(0.0), values.nan_to_num(0.0))
    assert raw_of(new.original()) == expected


@pytest.mark.parametrize("case", [case for case in checkpoints.CASES if " tensor " not in case.name], ids=str)
def test_zero_nan_and_extreme_scales(case):
    """A NaN stays in its own output; zeros give zeros; nothing else changes."""
    layer, exact = made(case, 48, 256)
    scales = next(tensor for name, tensor in layer.tensors().items() if name in ("weight_scale", "scales"))
    rows = scales if scales.shape[0] == 48 else scales.t()
    rows[3], rows[5], rows[7] = 0, torch.nan, torch.finfo(scales.dtype).max / 2**20
    new = encoded(layer)
    x = torch.randn(4, 256)
    for output in (new.quantized(x), new.original()(x)):
        assert (output[:, 3] == 0).all() and output[:, 5].isnan().all()
        others = [row for row in range(48) if row not in (3, 5, 7)]
        assert torch.isfinite(output[:, others]).all() and output[:, 7].isfinite().all() == (
            scales.dtype != torch.float32
        )
        assert (output[:, others] - x @ exact.float().t()[:, others]).abs().max() < 0.2


@pytest.mark.skipif(importlib.util.find_spec("compressed_tensors") is None, reason="not run: needs compressed-tensors")
@pytest.mark.parametrize(
    "case", [*checkpoints.COMPRESSED, *checkpoints.EIGHT_BITS[:1], checkpoints.EIGHT_BITS[3]], ids=str
)
def test_the_library_that_defines_the_format(case):
    """Its compressor writes the same tensors, and its numbers are ours."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    weight = torch.randn(48, 256, dtype=torch.bfloat16)
    ours, _ = case.write(weight)
    scheme = QuantizationScheme.model_validate(case.config["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(case.config["format"])
    given = {"weight": weight, "weight_scale": ours["weight_scale"]}
    if "weight_zero_point" in ours:
        group = scheme.weights.group_size or -1
        zero = checkpoints.rounded(weight, group, torch.bfloat16, symmetric=False)[2]
        given["weight_zero_point"] = torch.from_numpy(zero - 8).to(torch.int8)
    theirs = compressor.compress(given, scheme)
    described = {name: (tensor.dtype, tensor.shape) for name, tensor in theirs.items()}
    assert described == {name: (tensor.dtype, tensor.shape) for name, tensor in ours.items()}
    values = layer_of(case, theirs, 48, 256).dequantized(torch.float32)
    assert torch.equal(values.bfloat16(), compressor.decompress(dict(theirs), scheme)["weight"].bfloat16())
