"""`quantize="mxfp4"` for linear layers: kernels, accuracy, memory, later changes to the model, and loading."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import hf_rocm
from hf_rocm import ops, options
from hf_rocm.errors import OptionError
from hf_rocm.weights import quantize as quantizing
from tests.tolerance import assert_as_good_as_eager
from tests.weights import models
from tests.weights.models import IDS, LAYERS, assert_same_results, logits
from tests.weights.mxfp4_rounding import rounded


def quantized(**arguments):
    return hf_rocm.quantize(models.prepared(), "mxfp4", force=True, **arguments)


def test_a_model_in_mxfp4_has_the_expected_kernels_numbers_and_memory():
    model, stock = quantized(), models.build()
    with torch.no_grad(), ops.recording() as routes:
        actual = model(IDS, use_cache=False).logits
    shapes = [route.shapes[1] for route in routes if route.operation == "quantized_linear"]
    assert shapes == [(128, 8), (64, 8), (160, 8)] * LAYERS
    with options.override(tiers={"linear": "eager"}):
        eager = logits(model)
    left = model.__dict__[quantizing.REPORT]["left"]
    assert left["model.layers.0.mlp.down_proj"] == "its number of inputs, 80, is not a multiple of the group size 32"
    for path, layer in quantizing.layers(model):
        weight = stock.get_submodule(path).weight.detach()
        exact, nearest = rounded(weight)[2], layer.weight.double()
        # Only weights midway between two numbers may differ.
        other = exact != nearest
        assert torch.equal((exact - weight).abs()[other], (nearest - weight).abs()[other])
        assert other.float().mean() < 0.01
        packed = layer.quantized
        assert packed.data.nbytes + packed.scale.nbytes == packed.data.shape[0] * layer.in_features * 4.25 / 8
    assert "e2m1 in blocks of 32" in quantizing.summary(model)
    assert_as_good_as_eager(actual, eager, logits(model.double()))


def test_a_model_in_mxfp4_can_be_copied_restored_and_dequantised():
    stock = models.build()
    model = quantized(keep="cpu")
    before = logits(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(copied), before)
    hf_rocm.restore(model)
    assert_same_results(model, stock)
    again = quantized()
    with pytest.raises(OptionError, match="its original weights were not kept"):
        hf_rocm.restore(again)
    again.load_state_dict(stock.state_dict())
    assert torch.equal(logits(again), before)
    weights = {path: layer.weight for path, layer in quantizing.layers(again)}
    hf_rocm.dequantize(again)
    assert weights and all(torch.equal(again.get_submodule(path).weight, weight) for path, weight in weights.items())


def test_a_model_in_mxfp4_is_loaded_and_saved(tmp_path):
    models.build().save_pretrained(tmp_path)
    model = hf_rocm.from_pretrained(tmp_path, force=True, quantize="mxfp4")
    assert torch.equal(logits(model), logits(quantized()))
    model.save_pretrained(tmp_path / "saved")
    loaded = type(model).from_pretrained(tmp_path / "saved")
    layers = quantizing.layers(model)
    assert layers and all(torch.equal(loaded.get_submodule(path).weight, layer.weight) for path, layer in layers)
