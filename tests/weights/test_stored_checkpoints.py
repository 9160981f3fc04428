"""Quantised checkpoints that are loaded with their stored bytes: results, bytes, and the model after `restore`."""

from __future__ import annotations

import copy
import io
import json

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaForCausalLM

import hf_rocm
from hf_rocm import ops
from hf_rocm.errors import OptionError
from hf_rocm.layers.weight_group import SLOT
from hf_rocm.loading import stored_checkpoints as loading
from hf_rocm.weights.quantized import REPORT, Quantized, layers
from hf_rocm.weights.stored_linear import EncodedLinear, StoredLinear
from tests.releases import NEWEST
from tests.tolerance import assert_as_good_as_eager
from tests.weights import stored_checkpoints as checkpoints
from tests.weights.models import IDS, LAYERS, logits

LINEARS = 7 * LAYERS
WEIGHT_ONLY = [case for case in checkpoints.CASES if case.name.endswith(" None") or case in checkpoints.FOUR_BITS]
# Fewer formats are tested with releases other than the newest.
CASES, FEW = (checkpoints.CASES, checkpoints.FEW) if NEWEST else (checkpoints.FEW, checkpoints.FEW[::2])
every_case = pytest.mark.parametrize("case", CASES, ids=str)
few_cases = pytest.mark.parametrize("case", FEW, ids=str)


def stored_bytes(folder):
    return {name: checkpoints.raw(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}


def state_bytes(model):
    return {name: checkpoints.raw(tensor) for name, tensor in model.state_dict().items()}


@every_case
def test_every_number_and_every_byte_of_the_checkpoint_is_kept(tmp_path, case):
    reference = checkpoints.write(tmp_path, case)
    expected = stored_bytes(tmp_path)
    model = hf_rocm.from_pretrained(tmp_path, force=True)
    encoded = layers(model)
    assert len(encoded) == LINEARS and all(type(layer) is EncodedLinear for _, layer in encoded)
    assert not any(module.training for module in model.modules())
    for path, layer in encoded:
        assert torch.equal(layer.weight, reference.get_submodule(path).weight)
    assert state_bytes(model) == expected

    model.save_pretrained(tmp_path / "saved")
    assert stored_bytes(tmp_path / "saved") == expected
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["quantization_config"] == case.config
    again = hf_rocm.from_pretrained(tmp_path / "saved", force=True)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("case", WEIGHT_ONLY, ids=str)
def test_results_and_tokens_equal_the_dequantised_model(tmp_path, case):
    reference = checkpoints.write(tmp_path, case, attention_bias=True)
    model = hf_rocm.from_pretrained(tmp_path, force=True)
    with ops.recording() as routes:
        actual = logits(model)
    assert [route.operation for route in routes].count("quantized_linear") == 4 * LAYERS
    assert_as_good_as_eager(actual, logits(reference), logits(copy.deepcopy(reference).double()))
    tokens = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS, **tokens), reference.generate(IDS, **tokens))


@every_case
def test_restore_returns_the_original_model(tmp_path, case):
    """A restored model has the same objects with the same bytes, and forwards that dequantise."""
    reference = checkpoints.write(tmp_path, case)
    model = loading.load(LlamaForCausalLM.from_pretrained, tmp_path)
    modules = dict(model.named_modules())
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    grads = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert sum(type(module) is StoredLinear for module in modules.values()) == LINEARS
    assert_as_good_as_eager(logits(model), logits(reference), logits(copy.deepcopy(reference).double()))
    hf_rocm.prepare(model, force=True)
    assert len(layers(model)) == LINEARS and len(model.__dict__[REPORT]["left"]) == 0
    hf_rocm.restore(model)
    assert dict(model.named_modules()) == modules and not layers(model)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert after.keys() == tensors.keys() and all(after[name] is tensor for name, tensor in tensors.items())
    assert state_bytes(model) == stored_bytes(tmp_path)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == grads
    assert not any(name.startswith("_hf_rocm") for module in model.modules() for name in module.__dict__)


@few_cases
def test_memory_is_that_of_the_checkpoint(tmp_path, case):
    checkpoints.write(tmp_path, case, hidden_size=1024, intermediate_size=1024)
    model = hf_rocm.from_pretrained(tmp_path, force=True)
    loaded = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    file = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    stored = sum(tensor.nbytes for _, layer in layers(model) for tensor in layer.stored.tensors().values())
    assert abs(loaded + stored - file) <= 0.03 * file


@few_cases
def test_layers_that_share_an_input_run_as_one_gemm(tmp_path, case):
    checkpoints.write(tmp_path, case, attention_bias=True)
    model = hf_rocm.from_pretrained(tmp_path, force=True)
    groups = [module for module in model.modules() if isinstance(module.__dict__.get(SLOT), Quantized)]
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.quantized is attention.v_proj.quantized
    assert len(groups) == 2 * LAYERS


@few_cases
def test_copies_pickles_and_moves_keep_the_stored_bytes(tmp_path, case):
    checkpoints.write(tmp_path, case, torch.bfloat16)
    model = hf_rocm.from_pretrained(tmp_path, force=True)
    expected, results = state_bytes(model), logits(model)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    for other in (twin, read):
        assert state_bytes(other) == expected and torch.equal(logits(other), results)
        hf_rocm.restore(other)
        assert state_bytes(other) == expected
    packed = {name: value for name, value in expected.items() if "_proj." in name}
    nn.Module.to(model, torch.float32)
    assert {name: value for name, value in state_bytes(model).items() if name in packed} == packed
    hf_rocm.restore(model)
    nn.Module.to(model, torch.bfloat16)
    assert state_bytes(model) == expected


@few_cases
def test_a_state_dict_of_the_same_format_is_loaded(tmp_path, case):
    """Another state dict of the same format is loaded. Missing, unexpected and wrongly sized tensors are errors."""
    checkpoints.write(tmp_path / "one", case, attention_bias=True)
    model = hf_rocm.from_pretrained(tmp_path / "one", force=True)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if "_proj." in name and not name.endswith(("weight_shape", "g_idx")) and ".quant_" not in name:
            bits = tensor.flatten().view(torch.uint8)
            bits.copy_(bits.flip(0))
    model.load_state_dict(state)
    assert state_bytes(model) == {name: checkpoints.raw(tensor) for name, tensor in state.items()}
    name = next(name for name in state if name.endswith(f"q_proj.{case_bulk(model)}"))
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**state, name: state[name][:-1]})
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({other: tensor for other, tensor in state.items() if other != name})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**state, name + "_more": state[name]})


def case_bulk(model):
    return layers(model)[0][1].stored.format.bulk[0]


@few_cases
def test_dequantize_makes_an_ordinary_model(tmp_path, case):
    reference = checkpoints.write(tmp_path, case, attention_bias=True)
    hf_rocm.from_pretrained(tmp_path, force=True).dequantize()
    model = hf_rocm.dequantize(hf_rocm.from_pretrained(tmp_path, force=True))
    assert not layers(model) and not any(isinstance(module, StoredLinear) for module in model.modules())
    assert not any(module.training for module in model.modules())
    for name, tensor in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert getattr(model.config, "quantization_config", None) is None
    model.save_pretrained(tmp_path / "saved")
    stock = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert_as_good_as_eager(logits(stock), logits(reference), logits(reference.double()))


@few_cases
def test_a_model_loaded_with_a_device_map_compiles_into_one_graph(tmp_path, case):
    checkpoints.write(tmp_path, case, attention_bias=True)
    model = hf_rocm.from_pretrained(tmp_path, force=True, device_map={"": "cpu"})
    torch._dynamo.reset()
    compiled = torch.compile(model.model.layers[0].mlp, fullgraph=True, backend="eager")
    x = torch.randn(2, 3, model.config.hidden_size)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model.model.layers[0].mlp(x))
    assert "quantized_linear" in str(hf_rocm.explain(model))


@few_cases
def test_layers_on_disk_run_as_in_stock(tmp_path, case, caplog):
    """Before version 5, transformers can't offload buffers such as the stored tensors, so stock loads the checkpoint.

    In version 5, stock also loads bitsandbytes checkpoints with layers on disk.
    """
    reference = checkpoints.write(tmp_path, case, attention_bias=True)
    offloaded = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    offloaded |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    arguments = {"force": True, "device_map": offloaded, "offload_folder": tmp_path / "offloaded"}
    if Version(transformers.__version__) < Version("5") or case in checkpoints.BITSANDBYTES:
        # The format's package or a GPU is missing.
        with pytest.raises((ImportError, RuntimeError)):
            hf_rocm.from_pretrained(tmp_path, **arguments)
        assert "it are offloaded" in caplog.text
        return
    model = hf_rocm.from_pretrained(tmp_path, **arguments)
    if case not in checkpoints.EIGHT_BITS:
        assert_as_good_as_eager(logits(model), logits(reference), logits(copy.deepcopy(reference).double()))


def test_layers_of_unsupported_sizes_use_dequantised_weights(tmp_path):
    """Layers with unsupported sizes use their dequantised weights in the GEMM, and are listed."""
    case = checkpoints.compressed(-1)
    reference = checkpoints.write(tmp_path, case, intermediate_size=100)
    model = hf_rocm.from_pretrained(tmp_path, force=True)
    report = model.__dict__[REPORT]
    assert len(report["left"]) == 3 * LAYERS and report["layers"] == 4 * LAYERS
    assert "not multiples of 16" in report["left"]["model.layers.0.mlp.down_proj"]
    assert_as_good_as_eager(logits(model), logits(reference), logits(copy.deepcopy(reference).double()))
    assert state_bytes(model) == stored_bytes(tmp_path)
    assert "as in the checkpoint" in str(hf_rocm.explain(model))


@pytest.mark.parametrize("case", [*checkpoints.EIGHT_BITS[:4], checkpoints.FINEGRAINED[0]], ids=str)
def test_weights_of_another_dtype_are_not_loaded(tmp_path, case):
    """They would be cast to 8 bits without a scale."""
    reference = checkpoints.write(tmp_path, case)
    model = hf_rocm.from_pretrained(tmp_path, force=True)
    before = state_bytes(model)
    with pytest.raises(
        RuntimeError, match=r"dtype mismatch for model\.layers\.0\.self_attn\.q_proj\.weight: torch\.float32"
    ):
        model.load_state_dict(reference.state_dict(), strict=False)
    assert state_bytes(model) == before
    hf_rocm.restore(model)
    with pytest.raises(RuntimeError, match="dtype mismatch"):
        model.load_state_dict(reference.state_dict(), strict=False)
    assert state_bytes(model) == before


@pytest.mark.parametrize(
    "case", [checkpoints.COMPRESSED[5], checkpoints.AWQ[2], checkpoints.GPTQ[2], checkpoints.GPTQ[6]], ids=str
)
def test_layers_whose_last_group_is_smaller_use_dequantised_weights(tmp_path, case):
    reference = checkpoints.write(tmp_path, case, intermediate_size=320)
    model = hf_rocm.from_pretrained(tmp_path, force=True)
    left = model.__dict__[REPORT]["left"]
    paths = [f"model.layers.{layer}.mlp.down_proj" for layer in range(LAYERS)]
    assert left == dict.fromkeys(paths, "its number of inputs, 320, is not a multiple of the group size 128")
    assert_as_good_as_eager(logits(model), logits(reference), logits(copy.deepcopy(reference).double()))
    assert state_bytes(model) == stored_bytes(tmp_path)


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path):
    checkpoints.write(tmp_path, checkpoints.CASES[0])
    with pytest.raises(OptionError, match="already quantised"):
        hf_rocm.from_pretrained(tmp_path, force=True, quantize="int8")
    model = hf_rocm.from_pretrained(tmp_path, force=True)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    hf_rocm.prepare(model, force=True)
    assert len(layers(model)) == LINEARS
