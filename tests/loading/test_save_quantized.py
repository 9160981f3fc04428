"""save_quantized: hf_rocm and stock transformers read the saved weights, and the model itself is unchanged."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hf_rocm
from hf_rocm.errors import OptionError
from hf_rocm.weights.quantized import QuantizedLinear
from tests import eight_bit
from tests.weights import models
from tests.weights.stored_checkpoints import SIZES

KINDS = ["fp8", "int8", "int4", "int4-g64", "int4-g32", "mxfp4"]
every_kind = pytest.mark.parametrize("kind", KINDS)
LIBRARY = importlib.util.find_spec("compressed_tensors") is not None

# Runs in a separate process, because compressed-tensors changes nn.Module permanently.
STOCK = """
import pathlib, sys, torch
from transformers import AutoModelForCausalLM
for saved in pathlib.Path(sys.argv[1]).iterdir():
    model = AutoModelForCausalLM.from_pretrained(saved)
    with torch.no_grad():
        logits = model(torch.tensor([[3, 1, 4, 1, 5]])).logits
    weights = {name: module.weight.detach() for name, module in model.named_modules() if name.endswith("_proj")}
    torch.save((weights, logits), saved / "read")
"""


@pytest.fixture(autouse=True, scope="module")
def checked():
    eight_bit.check_all()


def quantized(kind, *, prepare=True, exclude=(), dtype=torch.float32, **changes):
    model = models.build(**{**SIZES, **changes}).to(dtype)
    if prepare:
        hf_rocm.prepare(model, force=True)
    return hf_rocm.quantize(model, kind, force=True, exclude=exclude)


@torch.no_grad()
def logits(model, ids=models.IDS):
    return model(ids, use_cache=False).logits


def state_of(model):
    """Every module, with the contents of its dictionary, by name."""
    return {path: (module, dict(module.__dict__)) for path, module in model.named_modules()}


def unchanged(model, before):
    current = state_of(model)
    assert current.keys() == before.keys()
    for path, (module, contents) in before.items():
        assert current[path][0] is module and current[path][1].keys() == contents.keys(), path
        assert all(current[path][1][name] is value for name, value in contents.items()), path
    assert "quantization_config" not in model.config.__dict__


@every_kind
@pytest.mark.parametrize("prepare", [True, False], ids=["prepared", "stock"])
def test_the_same_numbers_are_loaded(kind, prepare, tmp_path):
    model = quantized(kind, prepare=prepare)
    before = state_of(model)
    hf_rocm.save_quantized(model, tmp_path)
    unchanged(model, before)
    loaded = hf_rocm.from_pretrained(tmp_path, force=True)
    assert all(isinstance(layer, QuantizedLinear) for path, layer in loaded.named_modules() if path.endswith("_proj"))
    assert loaded.lm_head.weight.dtype == torch.float32
    if not prepare:
        hf_rocm.prepare(model, force=True)
    for ids in (models.IDS, models.IDS[:, :1]):
        assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert sum(tensor.nbytes for tensor in loaded.buffers()) == sum(tensor.nbytes for tensor in model.buffers())


@every_kind
def test_the_files_have_packed_weights(kind, tmp_path):
    hf_rocm.save_quantized(quantized(kind, exclude=["down_proj"]), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.0.self_attn.q_proj."
    names = {name.removeprefix(prefix): tensors[name].dtype for name in tensors if name.startswith(prefix)}
    if kind == "mxfp4":
        expected = {"weight_packed": torch.uint8, "weight_scale": torch.uint8}
    elif kind.startswith("int4"):
        expected = {"weight_packed": torch.int32, "weight_scale": torch.bfloat16, "weight_shape": torch.int64}
    else:
        number = torch.int8 if kind == "int8" else torch.float8_e4m3fn
        expected = {"weight": number, "weight_scale": torch.float32}
    assert names == expected
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == [f"model.layers.{layer}.mlp.down_proj" for layer in range(models.LAYERS)] + ["lm_head"]
    assert tensors["model.layers.0.mlp.down_proj.weight"].dtype == torch.float32


@pytest.fixture(scope="module")
def read_by_stock(checked, tmp_path_factory):
    """kind → (the model, the weights that stock transformers reads from the saved files, the logits with them)."""
    folder = tmp_path_factory.mktemp("saved")
    built = {}
    for kind in KINDS:
        # compressed-tensors decompresses MXFP4 only to bf16
        built[kind] = quantized(kind, attention_bias=True, dtype=torch.bfloat16 if kind == "mxfp4" else torch.float32)
        hf_rocm.save_quantized(built[kind], folder / kind)
    command = [sys.executable, "-c", STOCK, str(folder)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return {kind: (model, *torch.load(folder / kind / "read")) for kind, model in built.items()}


@pytest.mark.skipif(not LIBRARY, reason="not run: needs compressed-tensors")
@every_kind
def test_stock_transformers_reads_the_checkpoint(kind, read_by_stock):
    model, weights, actual = read_by_stock[kind]
    ordinary = hf_rocm.dequantize(model)
    assert len(weights) == 7 * models.LAYERS
    for name, weight in weights.items():
        torch.testing.assert_close(weight, ordinary.get_submodule(name).weight, rtol=2**-8, atol=0)
    expected = logits(ordinary, torch.tensor([[3, 1, 4, 1, 5]]))
    # With 8 bits, stock rounds the activations, too.
    if kind.startswith("int4"):
        assert (actual - expected).norm() <= 2**-8 * expected.norm()
    if kind == "mxfp4":
        assert all(torch.equal(weight, ordinary.get_submodule(name).weight) for name, weight in weights.items())
        exact = logits(ordinary.double(), torch.tensor([[3, 1, 4, 1, 5]]))
        assert (actual - exact).norm() <= 2 * (expected - exact).norm()


def test_fnuz_weights_are_stored_in_the_fn_format(tmp_path, monkeypatch):
    from hf_rocm.weights import eight_bit as weights

    monkeypatch.setattr(weights.EightBitWeight, "format_for", lambda model, kind: torch.float8_e4m3fnuz)
    model = quantized("fp8")
    expected = {path: layer.weight for path, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    hf_rocm.save_quantized(model, tmp_path)
    monkeypatch.undo()
    loaded = hf_rocm.from_pretrained(tmp_path, force=True)
    for path, weight in expected.items():
        largest = weight.abs().amax(1, keepdim=True)
        actual = loaded.get_submodule(path).weight
        assert torch.equal(actual[weight.abs() > largest / 2**12], weight[weight.abs() > largest / 2**12])
        assert ((actual - weight).abs() <= 1.01 * largest / 240 / 2**10).all()


def test_a_model_with_a_tied_head_and_kept_originals_is_saved(tmp_path):
    model = models.build(**SIZES, tie_word_embeddings=True)
    hf_rocm.prepare(model, force=True)
    originals = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hf_rocm.quantize(model, "int8", keep="cpu", force=True)
    hf_rocm.save_quantized(model, tmp_path)
    loaded = hf_rocm.from_pretrained(tmp_path, force=True)
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    hf_rocm.restore(model)
    assert all(torch.equal(tensor, originals[name]) for name, tensor in model.state_dict().items())


def test_a_quantised_head_is_saved(tmp_path):
    model = hf_rocm.quantize(models.build(**SIZES), "int4-g32", force=True, head=True)
    hf_rocm.save_quantized(model, tmp_path)
    loaded = hf_rocm.from_pretrained(tmp_path, force=True)
    assert isinstance(loaded.lm_head, QuantizedLinear)
    hf_rocm.prepare(model, force=True)
    assert torch.equal(logits(loaded), logits(model))


def test_saving_in_training_mode_changes_nothing(tmp_path):
    model = quantized("int8").train()
    before = state_of(model)
    hf_rocm.save_quantized(model, tmp_path)
    unchanged(model, before)


def test_a_failed_save_leaves_the_model_as_it_was(tmp_path, monkeypatch):
    model = quantized("int8")
    before = state_of(model)
    monkeypatch.setattr(type(model), "save_pretrained", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        hf_rocm.save_quantized(model, tmp_path)
    unchanged(model, before)


def test_models_that_cannot_be_saved_are_refused(tmp_path):
    with pytest.raises(OptionError, match="takes a model"):
        hf_rocm.save_quantized("llama", tmp_path)
    with pytest.raises(OptionError, match="takes a folder"):
        hf_rocm.save_quantized(quantized("int8"), None)
    with pytest.raises(OptionError, match="is not quantised"):
        hf_rocm.save_quantized(models.build(), tmp_path)
    with pytest.raises(OptionError, match="takes no state_dict"):
        hf_rocm.save_quantized(quantized("int8"), tmp_path, state_dict={})
    mixed = quantized("int4-g32")
    mixed.model.layers[1] = quantized("int4-g64").model.layers[1]
    with pytest.raises(OptionError, match="different kinds of weights"):
        hf_rocm.save_quantized(mixed, tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(OptionError, match="has no save_pretrained"):
        hf_rocm.save_quantized(nn.ModuleList([quantized("int8")]), tmp_path)
    hf_rocm.save_quantized(quantized("int8"), tmp_path)
    loaded = hf_rocm.from_pretrained(tmp_path, force=True)
    with pytest.raises(OptionError, match="loaded from a quantised checkpoint"):
        hf_rocm.save_quantized(loaded, tmp_path / "again")
    loaded.save_pretrained(tmp_path / "again")
    first, second = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
