"""Single layers in every format of quantised checkpoints: any bits, any scales, several sizes, and unchanged bytes."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn

from hf_rocm.device import Device
from hf_rocm.ops.mxfp4 import pack as mxfp4_bytes
from hf_rocm.ops.mxfp4 import powers, quantize
from hf_rocm.weights import eight_bit
from hf_rocm.weights.encode_stored import encode
from hf_rocm.weights.kinds import import_all
from hf_rocm.weights.stored import TensorInfo, parsers
from hf_rocm.weights.stored_linear import EncodedLinear, StoredLinear
from tests.tolerance import assert_as_good_as_eager
from tests.weights import stored_checkpoints as checkpoints

every_case = pytest.mark.parametrize("case", checkpoints.CASES, ids=str)


def layer_of(case, tensors, n, k, dtype=torch.float32):
    import_all()
    infos = {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    linear = nn.Linear(k, n, bias=False, device="meta", dtype=dtype)
    layer = StoredLinear(linear, checkpoints.format_of(case, tensors), infos, biased=False)
    for name, tensor in tensors.items():
        if layer.is_plain(name):
            layer._buffers[name] = tensor.contiguous()
    for name, tensor in tensors.items():
        if not layer.is_plain(name):
            layer.attach(name, tensor.contiguous())
    return layer


def make_layer(case, n, k, dtype=torch.float32):
    torch.manual_seed(n + k)
    tensors, exact = case.write(torch.randn(n, k) * 0.1)
    return layer_of(case, tensors, n, k, dtype), exact


def encoded(layer):
    """Convert the layer, in a model of one layer, to the kernels' encoding of the same numbers."""
    model = nn.Sequential(layer)
    encode(model)
    assert type(model[0]) is EncodedLinear
    return model[0]


def raw_of(layer):
    return {name: checkpoints.raw(tensor) for name, tensor in layer.state_dict().items()}


# N is an odd multiple of 16. With 4 bits, K is one block of runs or several blocks.
@every_case
@pytest.mark.parametrize(("n", "k"), [(16, 128), (48, 384), (112, 1152)])
def test_gemms_are_as_accurate_as_eager(case, n, k):
    layer, exact = make_layer(case, n, k)
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
        # x is quantised with one scale per row.
        if rounded:
            step = x.abs().amax(1, keepdim=True) / (127 if new.quantized.data.dtype == torch.int8 else 16)
            bound = 0.51 * step.double() * exact.abs().sum(1)
            assert ((actual.double() - wide).abs() <= bound + 1e-4).all(), m
        else:
            assert_as_good_as_eager(actual, eager, wide)
    assert raw_of(new) == expected and raw_of(new.original()) == expected


@every_case
def test_any_bits_are_restored(case):
    """Tensors with random bits, including values that no library writes: -128, fp8 NaN, negative or infinite scales."""
    layer, _ = make_layer(case, 64, 256)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in layer.tensors().items():
        if name not in ("weight_shape", "g_idx", "weight.quant_map") and "quant_state" not in name:
            bits = tensor.flatten().view(torch.uint8)
            bits.copy_(torch.randint(0, 256, bits.shape, generator=generator))
    expected, values = raw_of(layer), layer.dequantized(torch.float32)
    new = encoded(layer)
    assert raw_of(new) == expected
    assert torch.equal(new.weight.isnan(), values.isnan())
    assert torch.equal(new.weight.nan_to_num(0.0), values.nan_to_num(0.0))
    assert raw_of(new.original()) == expected


ROW_SCALES = [case for case in checkpoints.CASES if " tensor " not in case.name and " block " not in case.name]
# bitsandbytes has no scales per row, and MXFP4's scales can't be zero (see tests/triton/test_four_bit_codes.py)
ROW_SCALES = [case for case in ROW_SCALES if case not in (*checkpoints.BITSANDBYTES, checkpoints.MXFP4)]


@pytest.mark.parametrize("case", ROW_SCALES, ids=str)
def test_zero_nan_and_extreme_scales_affect_only_their_row(case):
    """A NaN scale affects only the outputs of its row, zero scales result in zeros, and other outputs stay correct."""
    layer, exact = make_layer(case, 48, 256)
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
    "case",
    [*checkpoints.COMPRESSED, checkpoints.MXFP4, *checkpoints.EIGHT_BITS[:1], checkpoints.EIGHT_BITS[3]],
    ids=str,
)
def test_the_format_is_that_of_the_library(case):
    """compressed-tensors writes the same names, dtypes and shapes; hf_rocm reads the same numbers from its tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    weight = torch.randn(48, 256, dtype=torch.bfloat16)
    layer_tensors, _ = case.write(weight)
    scheme = QuantizationScheme.model_validate(case.config["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(case.config["format"])
    scale = layer_tensors["weight_scale"]
    inputs = {"weight": weight, "weight_scale": powers(scale) if scale.dtype == torch.uint8 else scale}
    if "weight_zero_point" in layer_tensors:
        group = scheme.weights.group_size or -1
        zero = checkpoints.rounded(weight, group, torch.bfloat16, symmetric=False)[2]
        inputs["weight_zero_point"] = torch.from_numpy(zero - 8).to(torch.int8)
    compressed = compressor.compress(inputs, scheme)
    described = {name: (tensor.dtype, tensor.shape) for name, tensor in compressed.items()}
    assert described == {name: (tensor.dtype, tensor.shape) for name, tensor in layer_tensors.items()}
    # Ties, which `mxfp4_rounding` rounds towards zero, are rare.
    if case is checkpoints.MXFP4:
        assert (compressed["weight_packed"] != layer_tensors["weight_packed"]).float().mean() < 0.01
        assert torch.equal(mxfp4_bytes(quantize(weight)[0]).flatten(1), compressed["weight_packed"])
        assert torch.equal(quantize(weight)[1], compressed["weight_scale"])
    values = layer_of(case, compressed, 48, 256).dequantized(torch.float32)
    assert torch.equal(values.bfloat16(), compressor.decompress(dict(compressed), scheme)["weight"].bfloat16())


def test_zero_nan_and_extreme_scales_affect_only_their_block():
    """Zero, NaN and extreme scales affect only the rows of their block. The last block is smaller."""
    layer, _ = make_layer(checkpoints.FINEGRAINED[0], 272, 384)
    scales = layer.tensors()["weight_scale_inv"]
    scales[0], scales[1, 2], scales[2, 0] = 0, torch.nan, 2.0**90
    new, x = encoded(layer), torch.randn(4, 384)
    for output in (new.quantized(x), new.original()(x)):
        assert (output[:, :128] == 0).all() and output[:, 128:256].isnan().all()
        assert torch.isfinite(output[:, 256:]).all() and output[:, 256:].abs().min() > 2.0**60


def test_layers_are_joined_at_block_boundaries():
    """Layers are fused only if their rows fill whole blocks. The rows of the fused weight equal those of the layers."""
    case = checkpoints.FINEGRAINED[0]
    one, other, odd = (make_layer(case, n, 192)[0] for n in (256, 128, 144))
    assert one.format.joins(one.tensors(), other.tensors())
    assert not one.format.joins(one.tensors(), odd.tensors()) and not one.format.joins(odd.tensors(), one.tensors())
    weight = one.format.empty(384, 192, [one.tensors(), other.tensors()], None)
    one.format.put(weight, 0, one.tensors())
    one.format.put(weight, 256, other.tensors())
    assert torch.equal(weight.read(256, 384, torch.float32), other.dequantized(torch.float32))
    x = torch.randn(70, 192)
    assert torch.equal(weight(x, 256, 384), encoded(other).quantized(x))
    assert weight.scale.nbytes < 0.001 * 2 * weight.data.nbytes


@pytest.mark.parametrize(("weight_only", "scales"), [(False, (256,)), (True, (256,)), (False, (2, 4))], ids=str)
def test_only_weights_whose_gemms_round_x_are_shuffled_for_aiter(weight_only, scales, monkeypatch):
    """aiter's GEMM quantises x and reads shuffled weights. hf_rocm's kernels for few rows read unshuffled weights."""
    monkeypatch.setattr(eight_bit, "describe", lambda device: Device("cuda", rocm=True, arch="gfx950"))
    monkeypatch.setattr(eight_bit, "shuffle_refuses", lambda spec, device: None)
    monkeypatch.setattr(eight_bit, "choose", lambda spec: ("aiter", "gemm_a8w8_bpreshuffle"))
    data = torch.randn(256, 512).to(torch.float8_e4m3fn)
    weight = eight_bit.EightBitWeight(data, torch.ones(scales), None, weight_only=weight_only)
    weight.written(torch.bfloat16)
    assert weight.shuffled == weight.rounds == (not weight_only and scales == (256,))


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.19"), reason="not run: needs transformers 5.19")
@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_the_fp8_format_is_that_of_transformers(scale_fmt):
    """transformers writes tensors with the same names, shapes and dtypes, and reads the same numbers."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
    from transformers.utils.quantization_config import FineGrainedFP8Config

    import_all()
    case = checkpoints.FINEGRAINED[0]
    config = FineGrainedFP8Config(**({"scale_fmt": scale_fmt} if scale_fmt != "float" else {}))
    owner = SimpleNamespace(quantization_config=config, pre_quantized=True)
    weight = torch.randn(256, 384)
    written = Fp8Quantize(owner).convert({"weight": weight})
    compressed = {name.rpartition(".")[2]: tensor for name, tensor in written.items()}
    raw = {name: checkpoints.raw(tensor) for name, tensor in compressed.items()}
    assert compressed.keys() == case.write(weight)[0].keys()
    expected = parsers()["fp8"]({**config.to_dict(), "quant_method": "fp8"}).expected(256, 384)
    for name, tensor in compressed.items():
        assert tensor.dtype in expected[name].dtypes and tuple(tensor.shape) in expected[name].shapes
    layer = layer_of(case, compressed, 256, 384)
    read = Fp8Dequantize(owner).convert({name: [tensor] for name, tensor in compressed.items()})["weight"]
    # Some releases return a list.
    read = read[0] if isinstance(read, list) else read
    assert torch.equal(layer.dequantized(read.dtype), read)
    wide, x = layer.dequantized(torch.float64), torch.randn(5, 384)
    new = encoded(layer)
    assert_as_good_as_eager(new.quantized(x), x @ wide.float().t(), x.double() @ wide.t())
    assert raw_of(new) == raw
