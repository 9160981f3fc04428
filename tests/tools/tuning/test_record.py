"""A model without weights records the same GEMMs as the model with weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

import hf_rocm
from hf_rocm.errors import LoadError, TuningError
from hf_rocm.tools.tuning import record as module
from hf_rocm.tools.tuning import shapes
from hf_rocm.tools.tuning.record import loaded, record, without_weights
from tests.parity import models

BF16 = "torch.bfloat16"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {
        name: str(models.save_checkpoint(name, tmp_path_factory.mktemp(name), torch.bfloat16))
        for name in ("llama", "bert")
    }


def record_without_weights(path, batches, prompts, **arguments):
    with without_weights(path, **arguments) as built:
        return record(built, batches, prompts), shapes.fingerprint(built)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_model_without_weights_records_the_gemms_of_the_real_model(name, checkpoints):
    with loaded(checkpoints[name]) as model:
        real, fingerprint = record(model, [1, 3], [5]), shapes.fingerprint(model)
    assert record_without_weights(checkpoints[name], [1, 3], [5]) == (real, fingerprint)
    prepared = hf_rocm.from_pretrained(checkpoints[name], force=True).eval()
    assert (record(prepared, [1, 3], [5]), shapes.fingerprint(prepared)) == (real, fingerprint)


def test_projections_are_fused_and_only_the_last_logits_are_computed(checkpoints):
    gemms, _ = record_without_weights(checkpoints["llama"], [2], [5])
    # (N, K) of q + k + v, o, gate + up, and down
    layers = [(128, 64), (64, 64), (192, 64), (64, 96)]
    expected = {(m, n, k) for n, k in layers for m in (2, 10)} | {(2, 131, 64)}
    assert {shape[:3] for shape in gemms} == expected
    assert {(gemm.dtype, gemm.bias) for gemm in gemms} == {(BF16, False)}


def test_a_config_suffices_and_no_memory_is_needed(checkpoints, tmp_path):
    config = transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=2, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256, torch_dtype="float16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    gemms, _ = record_without_weights(str(tmp_path), [64], [4096])
    # The output of this GEMM would take 28 GiB.
    assert (262144, 57344, 8192) in {shape[:3] for shape in gemms}
    assert {gemm.dtype for gemm in gemms} == {"torch.float16"}
    assert {gemm.dtype for gemm in record_without_weights(str(tmp_path), [1], [4], dtype="bfloat16")[0]} == {BF16}


def test_experts_need_the_weights_only_before_transformers_5(tmp_path):
    config = transformers.MixtralConfig(**{**models.SHARED, "num_key_value_heads": 2, "num_local_experts": 4})
    config.architectures = ["MixtralForCausalLM"]
    config.save_pretrained(tmp_path)
    if Version(transformers.__version__) >= Version("5.0"):
        gemms, _ = record_without_weights(str(tmp_path), [1], [4], dtype="bfloat16")
        assert (4, 4, 64) in {shape[:3] for shape in gemms}, "the router's GEMM is missing"
        return
    with pytest.raises(TuningError, match="cannot be traced without its weights") as refused:
        record_without_weights(str(tmp_path), [1], [4])
    assert "--load" in refused.value.hint


def test_a_loop_that_depends_on_values_ends(checkpoints, monkeypatch):
    monkeypatch.setattr(module, "MAX_READS", 50)

    def waits(*arguments, **keywords):
        while torch.ones(3).any():
            pass

    with pytest.raises(TuningError, match="cannot be traced"), without_weights(checkpoints["llama"]) as built:
        monkeypatch.setattr(built.model, "forward", waits)
        record(built, [1], [1])


def test_an_encoder_decoder_is_recorded(tmp_path):
    config = transformers.T5Config(
        d_model=64, d_ff=96, num_layers=1, num_heads=4, d_kv=16, vocab_size=131, decoder_start_token_id=0
    )
    config.architectures = ["T5ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    gemms, _ = record_without_weights(str(tmp_path), [2], [7], dtype="bfloat16")
    assert {shape.m for shape in gemms} == {2, 14}


def test_a_model_that_cannot_be_recorded_is_an_error(checkpoints, tmp_path):
    with pytest.raises(LoadError, match="no config could be loaded"):
        record_without_weights(str(tmp_path / "nothing"), [1], [1])
    with pytest.raises(TuningError, match="there is no dtype 'bf17'"):
        record_without_weights(checkpoints["llama"], [1], [1], dtype="bf17")
    config = json.loads((Path(checkpoints["llama"]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(TuningError, match="is quantised"):
        record_without_weights(str(tmp_path), [1], [1])
    image = transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    image.architectures = ["ViTModel"]
    image.save_pretrained(tmp_path / "image")
    with pytest.raises(TuningError, match="takes pixel_values"):
        record_without_weights(str(tmp_path / "image"), [1], [1])
