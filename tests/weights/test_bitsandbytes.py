"""4-bit bitsandbytes checkpoints: the library's tensors, refused checkpoints, and damaged files."""

from __future__ import annotations

import importlib.util
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hf_rocm
from hf_rocm.errors import LoadError
from hf_rocm.ops.four_bit import CODES
from hf_rocm.weights.kinds import import_all
from hf_rocm.weights.quantized import layers
from hf_rocm.weights.stored import Unsupported, parsers
from hf_rocm.weights.stored_linear import StoredLinear
from tests.tolerance import assert_as_good_as_eager
from tests.weights import stored_checkpoints as checkpoints
from tests.weights.models import logits
from tests.weights.test_stored_formats import encoded, layer_of, make_layer, raw_of

NF4, DOUBLE, FP4 = checkpoints.BITSANDBYTES[:3]


def state_of(**values: Any) -> SimpleNamespace:
    text = {"quant_type": "nf4", "blocksize": 64, "shape": [32, 64], **values}
    return SimpleNamespace(values=lambda: tuple(json.dumps(text).encode()))


def test_the_codes_are_those_of_the_library():
    assert CODES["nf4"] == checkpoints.CODES["nf4"]
    assert CODES["fp4"] == tuple(torch.tensor(checkpoints.CODES["fp4"], dtype=torch.float64).float().tolist())


def test_pairs_of_numbers_are_unpacked_in_the_librarys_order():
    """The first number of a pair is in the high bits."""
    tensors, _ = NF4.write(torch.randn(16, 128))
    data = tensors["weight"].flatten()
    data[:2] = torch.tensor([0x1F, 0x70])
    weight = layer_of(NF4, tensors, 16, 128).dequantized(torch.float32)
    scale = tensors["weight.absmax"][0]
    assert torch.equal(weight[0, :4], scale * torch.tensor([CODES["nf4"][index] for index in (1, 15, 7, 0)]))


# N and K: some blocks continue in the next row, and the last block may not be full
@pytest.mark.parametrize("case", checkpoints.BITSANDBYTES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(5, 33), (16, 80), (48, 256)])
def test_layers_of_any_size_are_dequantised(case, n, k):
    layer, exact = make_layer(case, n, k)
    assert torch.equal(layer.dequantized(torch.float32), exact.float())
    assert (layer.format.refuses(n, k) is None) == (k == 256)


def test_layers_with_double_quantisation_are_joined_where_factors_begin():
    """One factor covers 256 scales, and these cover 64 rows of 256 numbers."""
    one, other, odd = (make_layer(DOUBLE, n, 256)[0] for n in (128, 64, 48))
    assert one.format.joins(one.tensors(), other.tensors())
    assert not one.format.joins(one.tensors(), odd.tensors()) and not odd.format.joins(odd.tensors(), one.tensors())
    weight = one.format.empty(192, 256, [one.tensors(), other.tensors()], None)
    one.format.put(weight, 0, one.tensors())
    one.format.put(weight, 128, other.tensors())
    assert torch.equal(weight.read(128, 192, torch.float32), other.dequantized(torch.float32))
    x = torch.randn(70, 256)
    assert torch.equal(weight(x, 128, 192), encoded(other).quantized(x))
    assert weight.nested_factors.nbytes + weight.nested_code.nbytes < 0.05 * weight.data.nbytes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"load_in_4bit": False, "load_in_8bit": True, "_load_in_8bit": True}, "LLM.int8"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
        ({"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type"),
        ({"bnb_4bit_new": True}, "bnb_4bit_new"),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused(change, reason):
    import_all()
    config = {**NF4.config, **change}
    with pytest.raises(Unsupported, match=reason):
        parsers()["bitsandbytes_4bit" if config["load_in_4bit"] else "bitsandbytes_8bit"](config)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"blocksize": 48}, "48"),
        ({"blocksize": None}, "None"),
        ({"nested_blocksize": 128, "nested_dtype": "float32"}, "128"),
        ({"nested_blocksize": 256, "nested_dtype": "float16"}, "float16"),
    ],
    ids=str,
)
def test_unsupported_states_are_refused(change, reason):
    import_all()
    format = parsers()["bitsandbytes_4bit"](NF4.config)
    with pytest.raises(Unsupported, match=reason):
        format.completed({"weight.quant_state.bitsandbytes__nf4": state_of(**change)})
    with pytest.raises(Unsupported, match="quant_state"):
        format.completed({"weight.quant_state.bitsandbytes__fp4": state_of()})


LAYER = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("name", "change", "actual"),
    [
        (".absmax", lambda tensor: tensor[:-1], "uint8"),
        (".absmax", lambda tensor: tensor.float(), "float32"),
        ("", lambda tensor: tensor[:-1], "uint8"),
        (".nested_absmax", lambda tensor: None, "no such tensor"),
        (".quant_map", lambda tensor: tensor.flip(0), "numbers that differ"),
        (".quant_state.bitsandbytes__nf4", lambda tensor: tensor[:-1], "nested_offset"),
    ],
    ids=str,
)
def test_invalid_layers_are_named(tmp_path, name, change, actual):
    checkpoints.write(tmp_path, DOUBLE)

    def damage(state):
        tensor = change(state.pop(LAYER + name))
        if tensor is not None:
            state[LAYER + name] = tensor

    checkpoints.edit_tensors(tmp_path, damage)
    with pytest.raises(LoadError, match="invalid") as raised:
        hf_rocm.from_pretrained(tmp_path, force=True)
    assert raised.value.facts["tensor"] == LAYER + name and actual in raised.value.facts["found"]


def test_a_state_of_the_wrong_dtype_is_invalid_and_may_have_any_shape(tmp_path):
    name = LAYER + ".quant_state.bitsandbytes__nf4"
    checkpoints.write(tmp_path, DOUBLE)
    checkpoints.edit_tensors(tmp_path, lambda state: state.update({name: state[name].float()}))
    with pytest.raises(LoadError, match="invalid") as raised:
        hf_rocm.from_pretrained(tmp_path, force=True)
    assert raised.value.facts["expected"] == "uint8 of any shape"


def test_nothing_is_reported_as_unexpected(tmp_path, caplog):
    reference = checkpoints.write(tmp_path, DOUBLE)
    before = type(reference)._keys_to_ignore_on_load_unexpected
    with caplog.at_level(logging.WARNING, logger="transformers"):
        model = hf_rocm.from_pretrained(tmp_path, force=True)
    assert "absmax" not in caplog.text and type(model)._keys_to_ignore_on_load_unexpected == before
    assert vars(model).keys() >= vars(reference).keys()
    ignored = "_keys_to_ignore_on_load_unexpected"
    assert vars(model).get(ignored) == vars(reference).get(ignored)


def test_the_restored_model_has_the_checkpoints_names(tmp_path):
    """The restored model loads the state dict of the prepared model, whose names are those of the checkpoint."""
    checkpoints.write(tmp_path, DOUBLE)
    model = hf_rocm.from_pretrained(tmp_path, force=True)
    expected, before = logits(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hf_rocm.restore(model)
    assert any(type(module) is StoredLinear for module in model.modules()) and not layers(model)
    for tensor in model.buffers():
        if tensor.dtype == torch.uint8:
            tensor.zero_()
    model.load_state_dict(before)
    hf_rocm.prepare(model, force=True)
    assert torch.equal(logits(model), expected)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="not run: needs bitsandbytes")
@pytest.mark.parametrize("size", [32, 64, 128, 256])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("code", CODES)
def test_the_format_is_that_of_the_library(code, double, size):
    """The library writes tensors with the same names, shapes and dtypes, and its numbers equal those of hf_rocm."""
    from bitsandbytes import functional

    weight = torch.randn(80, 512, dtype=torch.bfloat16)
    packed, state = functional.quantize_4bit(weight, blocksize=size, quant_type=code, compress_statistics=double)
    small = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    library = {"weight": packed, **small}
    case = checkpoints.bitsandbytes(code, size, double=double)
    written = case.write(weight)[0]
    described = {name: (tensor.dtype, tensor.shape) for name, tensor in library.items() if "quant_state" not in name}
    assert library.keys() == written.keys()
    assert described == {name: (written[name].dtype, written[name].shape) for name in described}
    expected = checkpoints.format_of(case, library).expected(80, 512)
    assert all(tensor.dtype in expected[name].dtypes for name, tensor in library.items())
    assert all(entry.check is None or entry.check(library[name].tolist()) is None for name, entry in expected.items())
    layer = layer_of(case, library, 80, 512)
    raw, x = raw_of(layer), torch.randn(5, 512)
    for dtype in (torch.bfloat16, torch.float32):
        state.dtype = dtype
        assert torch.equal(layer.dequantized(dtype), functional.dequantize_4bit(packed, state))
    wide, new = layer.dequantized(torch.float64), encoded(layer)
    assert_as_good_as_eager(new.quantized(x), x @ wide.float().t(), x.double() @ wide.t())
    assert raw_of(new) == raw and isinstance(new, nn.Module)
