"""Checkpoints that are loaded with their stored bytes, and the handling of damaged and unsupported ones."""

from __future__ import annotations

import copy
import logging
import threading

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, modeling_utils
from transformers.quantizers import auto

import hf_rocm
from hf_rocm.errors import LoadError
from hf_rocm.loading import stored_checkpoints
from hf_rocm.weights.quantized import layers
from hf_rocm.weights.stored_linear import StoredLinear
from tests.weights import stored_checkpoints as checkpoints

PACKED, INT8, FP8 = checkpoints.COMPRESSED[4], checkpoints.EIGHT_BITS[0], checkpoints.EIGHT_BITS[3]
AWQ, GPTQ, BLOCKS = checkpoints.AWQ[0], checkpoints.GPTQ[6], checkpoints.FINEGRAINED[0]
LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One intact checkpoint per layout."""
    paths = {}
    for case in (PACKED, INT8, FP8, AWQ, GPTQ, BLOCKS):
        paths[case.name] = tmp_path_factory.mktemp("checkpoint")
        checkpoints.write(paths[case.name], case)
    return paths


@pytest.fixture
def folder(folders, tmp_path):
    return lambda case=PACKED: checkpoints.copied(folders[case.name], tmp_path / "checkpoint")


@pytest.fixture
def untouched():
    """Check after the test that transformers' own tables and functions are restored."""
    tables = (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    # The second function exists only before 5.0.
    names = ("_get_resolved_checkpoint_files", "_infer_parameter_dtype")
    before = [dict(table) for table in tables]
    functions = [getattr(modeling_utils, name, None) for name in names]
    yield
    assert [dict(table) for table in tables] == before
    assert [getattr(modeling_utils, name, None) for name in names] == functions


pytestmark = pytest.mark.usefixtures("untouched")


def drop(name):
    return lambda state: state.pop(name)


def replace(name, change):
    def edit(state):
        state[name] = change(state[name])

    return edit


@pytest.mark.parametrize(
    ("case", "edit", "expected", "actual"),
    [
        (PACKED, drop(f"{LAYER}.weight_scale"), "[384, 2] bfloat16", "no such tensor"),
        (PACKED, drop(f"{LAYER}.weight_packed"), "[384, 32] int32", "no such tensor"),
        (PACKED, drop(f"{LAYER}.weight_shape"), "[2] int64", "no such tensor"),
        (PACKED, replace(f"{LAYER}.weight_packed", lambda tensor: tensor[:-16]), "[384, 32] int32", "[368, 32] int32"),
        (PACKED, replace(f"{LAYER}.weight_packed", lambda tensor: tensor.long()), "[384, 32] int32", "[384, 32] int64"),
        (PACKED, replace(f"{LAYER}.weight_scale", lambda tensor: tensor[:, :1]), "[384, 2] bfloat16", "[384, 1]"),
        (PACKED, replace(f"{LAYER}.weight_shape", lambda tensor: tensor - 1), "[2] int64", "(383, 255)"),
        (INT8, drop(f"{LAYER}.weight_scale"), "[384, 1]", "no such tensor"),
        (INT8, drop(f"{LAYER}.weight"), "[384, 256] int8", "no such tensor"),
        (INT8, replace(f"{LAYER}.weight", lambda tensor: tensor[:, :-8]), "[384, 256] int8", "[384, 248] int8"),
        (FP8, replace(f"{LAYER}.weight", lambda tensor: tensor.bfloat16()), "float8_e4m3fn", "bfloat16"),
        (FP8, replace(f"{LAYER}.weight_scale", lambda tensor: tensor[:7]), "[384, 1]", "[7, 1]"),
        (BLOCKS, drop(f"{LAYER}.weight_scale_inv"), "[3, 2] bfloat16 or float16 or float32", "no such tensor"),
        (BLOCKS, replace(f"{LAYER}.weight_scale_inv", lambda tensor: tensor.t()), "[3, 2]", "[2, 3] float32"),
        (BLOCKS, replace(f"{LAYER}.weight", lambda tensor: tensor[:-128]), "[384, 256]", "[256, 256]"),
        (BLOCKS, replace(f"{LAYER}.weight", lambda tensor: tensor.bfloat16()), "float8_e4m3fn", "bfloat16"),
        (AWQ, drop(f"{LAYER}.qzeros"), "[8, 48] int32", "no such tensor"),
        (AWQ, replace(f"{LAYER}.qweight", lambda tensor: tensor.t()), "[256, 48] int32", "[48, 256] int32"),
        (GPTQ, drop(f"{LAYER}.scales"), "[2, 384] bfloat16 or float16", "no such tensor"),
        (GPTQ, replace(f"{LAYER}.g_idx", lambda tensor: tensor * 0), "[256] int32", "groups that do not have 128"),
    ],
)
def test_an_invalid_layer_is_named_before_any_weight_is_read(folder, monkeypatch, case, edit, expected, actual):
    """A single error names the tensor, before any weight is read."""
    path = folder(case)
    checkpoints.edit_tensors(path, edit)
    monkeypatch.setattr(LlamaForCausalLM, "_load_pretrained_model", None)
    with pytest.raises(LoadError) as error:
        hf_rocm.from_pretrained(path, force=True)
    assert error.value.facts["tensor"].startswith(LAYER)
    assert expected in error.value.facts["expected"] and actual in error.value.facts["found"]


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_an_error(folder, monkeypatch, fraction):
    path = folder() / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(fraction * path.stat().st_size)])
    monkeypatch.setattr(LlamaForCausalLM, "_load_pretrained_model", None)
    with pytest.raises(LoadError):
        hf_rocm.from_pretrained(path.parent, force=True)


def changed(case, where, **values):
    config = copy.deepcopy(case.config)
    group = config["config_groups"]["group_0"]
    {"": config, "group": group, "weights": group["weights"]}[where].update(values)
    return config


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (changed(PACKED, "", format="marlin-24"), "marlin-24"),
        (changed(PACKED, "", format="nvfp4-pack-quantized"), "nvfp4"),
        (changed(PACKED, "", quantization_status="frozen"), "frozen"),
        (changed(PACKED, "", kv_cache_scheme={"num_bits": 8}), "key-value cache"),
        (changed(PACKED, "", sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
        (changed(PACKED, "", transform_config={"config_groups": {"u": {}}}), "transform_config"),
        (changed(PACKED, "", config_groups={}), "0 schemes"),
        (changed(PACKED, "", config_groups={"a": {}, "b": {}}), "2 schemes"),
        (changed(PACKED, "group", output_activations={"num_bits": 8}), "outputs"),
        (changed(PACKED, "group", input_activations={"num_bits": 8}), "activations are quantised"),
        (changed(PACKED, "", moe_sparsity_config={"kept": 4}), "moe_sparsity_config"),
        (changed(PACKED, "group", rotation="left"), "rotation"),
        (changed(PACKED, "weights", num_bits=8), "8 bits"),
        (changed(PACKED, "weights", codebook="nf4"), "codebook"),
        (changed(INT8, "weights", symmetric=False), "zero points"),
        (changed(PACKED, "weights", group_size=16), "16"),
        (changed(PACKED, "weights", actorder="group"), "actorder"),
        (changed(PACKED, "weights", dynamic=True), "dynamic"),
        (changed(INT8, "weights", strategy="group", group_size=128), "group"),
        (changed(INT8, "weights", num_bits=4), "4 bits"),
        (changed(INT8, "weights", type="float"), "float"),
        (changed(FP8, "weights", strategy="block", block_structure=[128, 128]), "block"),
        (changed(FP8, "group", input_activations={"num_bits": 4}), "activations have 4 bits"),
        (checkpoints.AWQ[0].config | {"version": "gemv"}, "gemv"),
        (checkpoints.AWQ[0].config | {"zero_point": False}, "without zero points"),
        (checkpoints.AWQ[0].config | {"bits": 8}, "8 bits"),
        (checkpoints.AWQ[0].config | {"group_size": 48}, "48"),
        (checkpoints.GPTQ[0].config | {"checkpoint_format": "marlin"}, "marlin"),
        (checkpoints.GPTQ[0].config | {"is_marlin_format": True}, "Marlin"),
        (checkpoints.GPTQ[0].config | {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic"),
        (checkpoints.GPTQ[0].config | {"bits": 3}, "3 bits"),
        (BLOCKS.config | {"weight_block_size": [1, 32]}, "1 × 32"),
        (BLOCKS.config | {"scale_fmt": "e5m3"}, "e5m3"),
        (BLOCKS.config | {"fmt": "e5m2"}, "e5m2"),
        (BLOCKS.config | {"expert_dtype": "fp4"}, "fp4"),
        (BLOCKS.config | {"modules_to_convert": ["embed_tokens"]}, "modules_to_convert"),
        (BLOCKS.config | {"dequantize": True}, "dequantize"),
    ],
)
def test_unsupported_features_are_left_to_stock(folder, caplog, config, reason):
    path = folder()
    checkpoints.edit(path, quantization_config=config)
    left_to_stock(path, caplog, reason)


def left_to_stock(path, caplog, reason):
    """Check that the reason is logged, and that the result is the same as without hf_rocm."""
    with caplog.at_level(logging.WARNING, "hf_rocm"):
        prepared = outcome(lambda: hf_rocm.from_pretrained(path, force=True))
    assert [
        record for record in caplog.records if "loaded by transformers" in record.message and reason in record.message
    ]
    assert prepared == outcome(lambda: LlamaForCausalLM.from_pretrained(path))


def outcome(call):
    try:
        model = call()
    except LoadError as error:
        # LoadError names the checkpoint, and has stock's error as its cause.
        return type(error.__cause__)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
        return type(error)
    return {type(module) for module in model.modules()}


def test_a_tensor_that_the_format_does_not_name_is_left_to_stock(folder, caplog):
    path = folder()
    checkpoints.edit_tensors(path, lambda state: state.update({f"{LAYER}.weight_g_idx": torch.zeros(256).int()}))
    left_to_stock(path, caplog, "weight_g_idx")


def test_a_layer_that_the_model_does_not_have_is_left_to_stock(folder, caplog):
    path = folder()

    def rename(state):
        for name in [name for name in state if name.startswith(LAYER)]:
            state[name.replace("up_proj", "experts.0.up_proj")] = state.pop(name)

    checkpoints.edit_tensors(path, rename)
    left_to_stock(path, caplog, "experts.0.up_proj")


def test_weights_outside_safetensors_are_left_to_stock(folder, caplog):
    path = folder()
    file = path / "model.safetensors"
    torch.save({"model.norm.weight": torch.ones(256)}, path / "pytorch_model.bin")
    file.unlink()
    left_to_stock(path, caplog, "safetensors")


def test_without_force_the_model_is_loaded_as_in_stock(folder, monkeypatch):
    """If the model stays stock, `stored_checkpoints.load` must not be called. The test replaces it with None."""
    monkeypatch.setattr(stored_checkpoints, "load", None)
    path = folder()
    assert outcome(lambda: hf_rocm.from_pretrained(path)) == outcome(lambda: LlamaForCausalLM.from_pretrained(path))


def test_a_load_with_a_quantization_config_is_left_to_stock(folder):
    path = folder()
    config_class = auto.AutoQuantizationConfig
    config = {"quant_method": "quanto", "weights": "int8"}
    assert outcome(
        lambda: hf_rocm.from_pretrained(path, force=True, quantization_config=config_class.from_dict(config))
    ) == (outcome(lambda: LlamaForCausalLM.from_pretrained(path, quantization_config=config_class.from_dict(config))))


def test_an_unquantised_checkpoint_has_no_quantised_layers(tmp_path):
    checkpoints.build().save_pretrained(tmp_path)
    model = hf_rocm.from_pretrained(tmp_path, force=True)
    assert not layers(model) and getattr(model, "hf_quantizer", None) is None


def test_nothing_is_replaced_for_a_folder_without_a_quantization_config(folder, tmp_path, monkeypatch):
    plain, entered = tmp_path / "plain", []
    checkpoints.build().save_pretrained(plain)
    entering = stored_checkpoints._replaced_quantizers
    monkeypatch.setattr(stored_checkpoints, "_replaced_quantizers", lambda: entered.append(True) or entering())
    model = stored_checkpoints.load(LlamaForCausalLM.from_pretrained, plain)
    assert not entered
    stored_checkpoints.load(LlamaForCausalLM.from_pretrained, plain, config=model.config)
    stored_checkpoints.load(LlamaForCausalLM.from_pretrained, folder())
    assert len(entered) == 2
    # With this file, the weights may be in another folder.
    (plain / "adapter_config.json").write_text("{}")
    stored_checkpoints.load(lambda path: None, plain)
    assert len(entered) == 3


def test_another_thread_stays_stock(folder, tmp_path):
    """A concurrent load in another thread runs stock code, with the same result or error as without hf_rocm."""
    path, results = folder(), []

    def load_stock():
        results.append(outcome(lambda: LlamaForCausalLM.from_pretrained(path)))

    def call():
        thread = threading.Thread(target=load_stock)
        thread.start()
        thread.join()
        return LlamaForCausalLM.from_pretrained(path)

    model = stored_checkpoints.load(call)
    assert any(isinstance(module, StoredLinear) for module in model.modules())
    assert results == [outcome(lambda: LlamaForCausalLM.from_pretrained(path))]


def test_the_tensors_of_a_layer_may_be_in_several_files(folder, tmp_path):
    """The tensors of a layer may be in several files, and the base model's names differ from the checkpoint's."""
    model = hf_rocm.from_pretrained(folder(), force=True)
    expected = {name: checkpoints.raw(tensor) for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    again = hf_rocm.from_pretrained(tmp_path / "sharded", force=True)
    assert {name: checkpoints.raw(tensor) for name, tensor in again.state_dict().items()} == expected
    base = hf_rocm.from_pretrained(tmp_path / "sharded", force=True, auto_class="LlamaModel")
    state = {f"model.{name}": checkpoints.raw(tensor) for name, tensor in base.state_dict().items()}
    assert state == {name: value for name, value in expected.items() if name in state} and len(layers(base)) == 14


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_keep_their_dtype_if_the_model_has_another(folder, dtype):
    path = folder(FP8)
    checkpoints.edit_tensors(path, replace(f"{LAYER}.weight_scale", lambda tensor: tensor.float() * 1.0001))
    model = hf_rocm.from_pretrained(path, force=True, dtype=dtype)
    state = model.state_dict()
    assert state[f"{LAYER}.weight_scale"].dtype == torch.float32 and model.lm_head.weight.dtype == dtype
    assert state["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.bfloat16
    assert model(torch.tensor([[1, 2]])).logits.dtype == dtype


@pytest.mark.skipif(Version(transformers.__version__) < Version("5"), reason="not run: needs transformers 5")
def test_scales_of_one_byte_are_read(folder):
    """Scales of one byte, like DeepSeek's `ue8m0`; transformers 4 does not support this dtype."""
    path = folder(BLOCKS)

    def powers(state):
        for name in [name for name in state if name.endswith("weight_scale_inv")]:
            state[name] = state[name].to(torch.float8_e8m0fnu)

    checkpoints.edit_tensors(path, powers)
    checkpoints.edit(path, quantization_config={**BLOCKS.config, "scale_fmt": "ue8m0"})
    expected = {name: checkpoints.raw(tensor) for name, tensor in load_file(path / "model.safetensors").items()}
    model = hf_rocm.from_pretrained(path, force=True)
    assert {name: checkpoints.raw(tensor) for name, tensor in model.state_dict().items()} == expected
    layer = dict(layers(model))[LAYER]
    scale = layer.stored.tensors()["weight_scale_inv"].double()
    data = layer.state_dict()["weight"].double()
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(layer.weight.double(), data * wide) and (scale.log2() % 1 == 0).all()


def test_auto_prepare(folder):
    hf_rocm.auto_prepare(force=True)
    try:
        assert len(layers(LlamaForCausalLM.from_pretrained(folder()))) == 14
    finally:
        hf_rocm.auto_prepare(False)
