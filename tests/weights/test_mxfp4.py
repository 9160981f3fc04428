"""MXFP4 checkpoints of gpt-oss are loaded with their stored bytes: results, copies, and the model after `restore`."""

from __future__ import annotations

import copy
import io
import json
import logging

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from torch import nn

import hf_rocm
from hf_rocm import ops
from hf_rocm.errors import LoadError, OptionError
from hf_rocm.loading import stored_checkpoints as loading
from hf_rocm.ops.mxfp4 import dequantize
from hf_rocm.weights.quantized import REPORT
from tests.tolerance import assert_as_good_as_eager
from tests.weights import stored_checkpoints as checkpoints
from tests.weights.models import IDS, logits

if Version(transformers.__version__) < Version("4.55"):
    pytest.skip("not run: needs transformers 4.55, the first with gpt-oss", allow_module_level=True)

from transformers import GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hf_rocm.weights.stored_experts import StoredExperts
from tests.weights import mxfp4_checkpoints as mxfp4

LAYER = "model.layers.1.mlp.experts"
TOKENS = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def stored_bytes(folder):
    return {name: checkpoints.raw(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}


def state_bytes(model):
    return {name: checkpoints.raw(tensor) for name, tensor in model.state_dict().items()}


def experts_of(model):
    return [module for module in model.modules() if isinstance(module, StoredExperts)]


def prepared(folder, **arguments):
    model = hf_rocm.from_pretrained(folder, force=True, attn_implementation="eager", **arguments)
    assert len(experts_of(model)) == mxfp4.LAYERS
    return model


def check_results(reference, model):
    wide = copy.deepcopy(reference).double()
    # The default experts implementation of transformers 5 does not support float64.
    wide.config._experts_implementation = "eager"
    assert_as_good_as_eager(logits(model), logits(reference), logits(wide))


def test_every_byte_of_the_checkpoint_is_kept(tmp_path):
    reference = mxfp4.write(tmp_path)
    expected = stored_bytes(tmp_path)
    model = prepared(tmp_path)
    assert state_bytes(model) == expected
    assert model.__dict__[REPORT]["layers"] == mxfp4.LAYERS and not model.__dict__[REPORT]["left"]
    for layer, stock in zip(model.model.layers, reference.model.layers, strict=True):
        weights, tensors = stock.mlp.experts, layer.mlp.experts.tensors()
        for name in ("gate_up_proj", "down_proj"):
            actual = dequantize(tensors[f"{name}_blocks"], tensors[f"{name}_scales"], torch.float32)
            assert torch.equal(actual.transpose(1, 2), getattr(weights, name))

    model.save_pretrained(tmp_path / "saved")
    assert stored_bytes(tmp_path / "saved") == expected
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"] == mxfp4.CONFIG
    assert torch.equal(logits(prepared(tmp_path / "saved")), logits(model))


@pytest.mark.parametrize("experts", [{}, {"num_local_experts": 2}], ids=["some", "every"])
def test_results_and_tokens_equal_the_dequantised_model(tmp_path, experts):
    """With two experts, every token is routed to every expert."""
    reference = mxfp4.write(tmp_path, **experts)
    model = prepared(tmp_path)
    with ops.recording() as routes:
        check_results(reference, model)
    assert [route.operation for route in routes].count("mxfp4_experts") == mxfp4.LAYERS
    assert torch.equal(model.generate(IDS, **TOKENS), reference.generate(IDS, **TOKENS))


def test_the_numbers_equal_those_of_transformers(tmp_path):
    mxfp4.write(tmp_path, torch.bfloat16)
    model = prepared(tmp_path)
    # In every release, transformers loads this checkpoint in bf16.
    stock = GptOssForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    for path, experts in [(path, one) for path, one in model.named_modules() if isinstance(one, StoredExperts)]:
        tensors, loaded = experts.tensors(), stock.get_submodule(path)
        for name in ("gate_up_proj", "down_proj"):
            stored = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
            expected = convert_moe_packed_tensors(*stored, dtype=torch.bfloat16)
            # transformers 4.55 transposes the weight afterwards.
            if expected.shape != getattr(loaded, name).shape:
                expected = expected.transpose(1, 2)
            assert torch.equal(dequantize(*stored, torch.bfloat16).transpose(1, 2), expected)
            assert torch.equal(getattr(loaded, name), expected)


def test_restore_returns_the_original_model(tmp_path):
    reference = mxfp4.write(tmp_path)
    model = loading.load(GptOssForCausalLM.from_pretrained, tmp_path, attn_implementation="eager")
    modules, tensors = dict(model.named_modules()), dict([*model.named_parameters(), *model.named_buffers()])
    grads = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with ops.recording() as routes:
        check_results(reference, model)
    assert not [route for route in routes if route.operation == "mxfp4_experts"]
    hf_rocm.prepare(model, force=True)
    check_results(reference, model)
    hf_rocm.restore(model)
    assert dict(model.named_modules()) == modules and state_bytes(model) == stored_bytes(tmp_path)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert after.keys() == tensors.keys() and all(after[name] is tensor for name, tensor in tensors.items())
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == grads
    assert not any(name.startswith("_hf_rocm") for module in model.modules() for name in module.__dict__)


def test_memory_is_that_of_the_checkpoint(tmp_path):
    mxfp4.write(tmp_path)
    model = prepared(tmp_path)
    loaded = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    file = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    assert abs(loaded - file) <= 0.03 * file
    assert all(parameter.is_meta for name, parameter in experts_of(model)[0].replaced[0].named_parameters())


def test_copies_pickles_and_moves_keep_the_stored_bytes(tmp_path):
    mxfp4.write(tmp_path, torch.bfloat16)
    model = prepared(tmp_path)
    expected, results = state_bytes(model), logits(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert state_bytes(other) == expected and torch.equal(logits(other), results)
        hf_rocm.restore(other)
        assert state_bytes(other) == expected
    nn.Module.to(model, torch.float32)
    experts = experts_of(model)[0]
    assert experts.dtype == experts.down_proj_bias.dtype == torch.float32
    assert {tensor.dtype for tensor in experts.tensors().values()} == {torch.uint8}
    nn.Module.to(model, torch.bfloat16)
    again = state_bytes(model)
    # compare only experts, because some releases keep norms in fp32
    assert all(again[name] == value for name, value in expected.items() if "experts" in name)


def test_a_state_dict_is_loaded(tmp_path):
    mxfp4.write(tmp_path)
    model = prepared(tmp_path)
    state = {name: tensor.flip(0) if "experts" in name else tensor for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    assert state_bytes(model) == {name: checkpoints.raw(tensor) for name, tensor in state.items()}
    name = f"{LAYER}.down_proj_scales"
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**state, name: state[name][:-1]})
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({other: tensor for other, tensor in state.items() if other != name})


def test_dequantize_makes_an_ordinary_model(tmp_path):
    reference = mxfp4.write(tmp_path)
    model = hf_rocm.dequantize(prepared(tmp_path))
    assert not experts_of(model) and getattr(model.config, "quantization_config", None) is None
    for name, tensor in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    check_results(reference, model)
    hf_rocm.prepare(model, force=True)
    with ops.recording() as routes:
        check_results(reference, model)
    assert [route.operation for route in routes].count("experts") == mxfp4.LAYERS
    model.save_pretrained(tmp_path / "saved")
    check_results(reference, GptOssForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_experts_stay_packed_if_the_model_has_another_dtype(tmp_path, dtype):
    mxfp4.write(tmp_path, torch.bfloat16)
    model = prepared(tmp_path, dtype=dtype)
    state = model.state_dict()
    assert state[f"{LAYER}.down_proj_scales"].dtype == torch.uint8 and state[f"{LAYER}.down_proj_bias"].dtype == dtype
    assert logits(model).dtype == dtype and torch.isfinite(logits(model)).all()


def test_experts_loaded_with_a_device_map_compile_into_one_graph(tmp_path):
    mxfp4.write(tmp_path, torch.bfloat16)
    experts = experts_of(prepared(tmp_path, device_map={"": "cpu"}))[0]
    torch._dynamo.reset()
    arguments = torch.randn(7, mxfp4.HIDDEN).bfloat16(), torch.tensor([[0, 3]] * 7), torch.rand(7, 2).bfloat16()
    with torch.no_grad():
        compiled = torch.compile(experts, fullgraph=True, backend="eager")(*arguments)
        assert torch.equal(compiled, experts(*arguments))


def test_explain_describes_the_format(tmp_path):
    mxfp4.write(tmp_path)
    model = prepared(tmp_path)
    text = hf_rocm.explain(model).details()
    assert "experts in MXFP4" in text and f"2 of {mxfp4.EXPERTS}" in text


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path):
    mxfp4.write(tmp_path)
    with pytest.raises(OptionError, match="already quantised"):
        prepared(tmp_path, quantize="int8")


def drop(name):
    return lambda state: state.pop(name)


def replace(name, change):
    return lambda state: state.update({name: change(state[name])})


@pytest.mark.parametrize(
    ("edit", "expected", "actual"),
    [
        (drop(f"{LAYER}.down_proj_scales"), "[6, 64, 3] uint8", "no such tensor"),
        (drop(f"{LAYER}.down_proj_blocks"), "[6, 64, 3, 16] uint8", "no such tensor"),
        (drop(f"{LAYER}.gate_up_proj_blocks"), "[6, 192, 2, 16] uint8", "no such tensor"),
        (drop(f"{LAYER}.gate_up_proj_bias"), "[6, 192]", "no such tensor"),
        (replace(f"{LAYER}.down_proj_blocks", lambda tensor: tensor[:4]), "[6, 64, 3, 16]", "[4, 64, 3, 16]"),
        (replace(f"{LAYER}.down_proj_blocks", lambda tensor: tensor.flatten(2)), "[6, 64, 3, 16]", "[6, 64, 48]"),
        (replace(f"{LAYER}.gate_up_proj_scales", lambda tensor: tensor[..., :1]), "[6, 192, 2]", "[6, 192, 1]"),
        (replace(f"{LAYER}.gate_up_proj_scales", lambda tensor: tensor.float()), "uint8", "float32"),
    ],
)
def test_a_damaged_layer_is_named_before_any_weight_is_read(tmp_path, monkeypatch, edit, expected, actual):
    """A single error names the tensor, before any weight is read."""
    mxfp4.write(tmp_path)
    checkpoints.edit_tensors(tmp_path, edit)
    monkeypatch.setattr(GptOssForCausalLM, "_load_pretrained_model", None)
    with pytest.raises(LoadError) as error:
        prepared(tmp_path)
    assert error.value.facts["tensor"].startswith(LAYER)
    assert expected in error.value.facts["expected"] and actual in error.value.facts["found"]


def test_a_truncated_file_is_an_error(tmp_path, monkeypatch):
    mxfp4.write(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size - 1])
    monkeypatch.setattr(GptOssForCausalLM, "_load_pretrained_model", None)
    with pytest.raises(LoadError):
        prepared(tmp_path)


@pytest.mark.parametrize(
    ("config", "more", "reason"),
    [
        ({"dequantize": True}, {}, "dequantize"),
        ({"rotation": "left"}, {}, "rotation"),
        ({}, {f"{LAYER}.down_proj_g_idx": torch.zeros(1)}, "down_proj_g_idx"),
    ],
    ids=["dequantize", "unknown", "tensor"],
)
def test_unsupported_features_are_left_to_stock(tmp_path, caplog, config, more, reason):
    """On a CPU, stock dequantises checkpoints that have these features."""
    reference = mxfp4.write(tmp_path, torch.bfloat16)
    checkpoints.edit(tmp_path, quantization_config={**mxfp4.CONFIG, **config})
    checkpoints.edit_tensors(tmp_path, lambda state: state.update(more))
    with caplog.at_level(logging.WARNING, "hf_rocm"):
        model = hf_rocm.from_pretrained(tmp_path, force=True, attn_implementation="eager")
    records = [record.message for record in caplog.records if "loaded by transformers" in record.message]
    assert len(records) == 1 and reason in records[0]
    assert not experts_of(model)
    weights = model.model.layers[1].mlp.experts.down_proj
    assert torch.equal(weights, reference.model.layers[1].mlp.experts.down_proj)
