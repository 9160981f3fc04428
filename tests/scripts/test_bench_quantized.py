"""scripts/bench-quantized: its checkpoints in every format, and its measurements, on a CPU with a tiny model."""

from __future__ import annotations

import copy
import math
import runpy
from pathlib import Path

import pytest
import torch
import transformers

import hf_rocm
from hf_rocm.loading import stored_checkpoints
from hf_rocm.weights.quantized import layers
from hf_rocm.weights.stored_experts import StoredExperts
from tests.tolerance import assert_as_good_as_eager

ROOT = Path(__file__).resolve().parents[2]
LAYERS = 2
LLAMA = {"intermediate_size": 768}
GPT_OSS = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
GPT_OSS |= {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4}
# The error of an input that is rounded to 8 bits, relative to the typical magnitude of its row. For int8 it is half a
# step, and the largest number of a row is about four times its typical magnitude.
ROUNDED = {"ct-fp8": 2**-4, "ct-int8": 4 / 254}
NAMES = (
    *("awq", "gptq", "gptq-desc_act", "ct-int4", "nf4", "nf4-double", "fp4", "ct-mxfp4"),
    *("fp8-blocks", "ct-fp8", "ct-int8", "gpt-oss"),
)


@pytest.fixture
def checkpoints(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from lib import packed_checkpoints

    return packed_checkpoints


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(100, 116).view(2, 8), use_cache=False).logits


def test_the_formats_are_those_of_this_file(checkpoints):
    assert set(checkpoints.FORMATS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_checkpoint_gives_the_results_of_its_dequantised_weights(checkpoints, tmp_path, name):
    if name == "gpt-oss" and not hasattr(transformers, "GptOssConfig"):
        pytest.skip("not run: needs transformers 4.55")
    shape, sizes = ("gpt-oss-20b", GPT_OSS) if name == "gpt-oss" else ("small", LLAMA)
    nbytes = checkpoints.write(tmp_path, name, shape, layers=LAYERS, **sizes)
    model = hf_rocm.from_pretrained(tmp_path, force=True)
    assert next(model.parameters()).dtype == torch.bfloat16
    loaded_bytes = sum(tensor.nbytes for module in model.modules() for tensor in module.buffers(recurse=False))
    if name == "gpt-oss":
        assert sum(isinstance(module, StoredExperts) for module in model.modules()) == LAYERS
    else:
        assert len(layers(model)) == 7 * LAYERS
    assert abs(loaded_bytes - nbytes) <= 0.03 * nbytes

    cls = getattr(transformers, model.config.architectures[0])
    dequantised = stored_checkpoints.load(cls.from_pretrained, tmp_path, torch_dtype="auto")
    actual, eager, exact = logits(model), logits(dequantised), logits(copy.deepcopy(dequantised).double())
    # The scales preserve the magnitude of the inputs.
    assert 0.5 < exact.std() < 2
    if name not in ROUNDED:
        assert_as_good_as_eager(actual, eager, exact)
    else:
        # The number of GEMMs in sequence; their errors are independent.
        in_sequence = 4 * LAYERS
        assert (actual - exact).norm() <= ROUNDED[name] * math.sqrt(in_sequence) * exact.norm()


def test_a_kind_that_fails_does_not_stop_the_others(capsys, monkeypatch):
    requested = ["--shape", "small", "--layers", "1", "--group", "64", "--device", "cpu", "--kinds", "int8,int3,awq"]
    sizes = ["--prompt", "8", "--new", "3", "--rounds", "1", "--batch", "1,2", "--together", "2"]
    monkeypatch.setattr("sys.argv", ["bench-quantized", *requested, *sizes])
    main = runpy.run_path(str(ROOT / "scripts" / "bench-quantized"))["main"]
    assert main() == 1
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert max(map(len, lines)) <= 120
    times = [line.split()[0] for line in lines if line[:2] == "  " and line[2:3].strip()]
    assert times == ["bf16", "int8", "bf16", "int8", "bf16", "awq", "bf16", "awq"]
    assert sum("int3" in line for line in shown.err.splitlines()) == 1


def test_bf16_is_measured_twice_if_the_caches_do_not_fit(checkpoints, capsys, monkeypatch):
    from lib import quantized_models

    monkeypatch.setattr(quantized_models, "_fit", lambda *_: False)
    sizes = {"prompt": 8, "new": 3, "rounds": 1, "together": 4, "group": 64, "layers": 1}
    run = quantized_models.Run("small", ("ct-int4", "nf4"), (1,), **sizes, device=torch.device("cpu"))
    with torch.no_grad():
        assert quantized_models.measure(run) == []
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-4:]] == ["bf16", "ct-int4", "nf4", "bf16"]
    assert "one after another" in lines[-6]
