"""`hf-rocm verify`: exit codes, what is printed, golden files from one machine to another, and damaged ones."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from hf_rocm.cli import main
from hf_rocm.diagnostics.verify.golden import FORMAT
from tests.diagnostics.verify import faults


def verify(*arguments):
    return main(["verify", *map(str, arguments), "--device", "cpu", "--quick"])


@pytest.fixture(scope="module")
def golden(tiny_checkpoint, tmp_path_factory):
    """Recorded without ROCm and without force: stock alone."""
    file = tmp_path_factory.mktemp("golden") / "tiny.safetensors"
    assert verify(tiny_checkpoint, "--save-golden", file) == 0
    return file


def rewritten(golden, file, *, drop="", **changes):
    """The golden file with a part of its header changed, or without one of its tensors."""
    with safe_open(golden, framework="pt") as opened:
        header = json.loads(opened.metadata()[FORMAT])
        tensors = {name: opened.get_tensor(name) for name in opened.keys() if name != drop}  # noqa: SIM118
    save_file(tensors, file, {FORMAT: json.dumps({**header, **changes})})
    return file


def test_a_checkpoint_is_verified_and_drawn(tiny_checkpoint, golden, tmp_path, capsys):
    picture = tmp_path / "picture.svg"
    capsys.readouterr()
    assert verify(tiny_checkpoint, "--force", "--golden", golden, "--picture", picture, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in told["checks"]}
    assert told["passed"] and len(told["layers"]) == 4
    assert checks["golden prompt"]["status"] == checks["golden padded batch"]["status"] == "passed"
    assert "same versions on the same kind of device" in checks["golden prompt"]["note"]
    assert picture.read_text().startswith("<svg")


def test_a_fault_exits_with_1_and_names_the_layer(tiny_checkpoint, golden, capsys):
    with faults.instead("rope", faults.first_rows_positions):
        assert verify(tiny_checkpoint, "--force", "--golden", golden) == 1
    out = capsys.readouterr().out
    assert "padded batch      failed" in out and "golden padded batch" in out
    assert "model.layers.0: self_attn.rotated query is the first that differs" in " ".join(out.split())


def test_random_weights_of_a_named_shape(capsys):
    assert verify("--config", "tiny-mistral", "--force") == 0
    out = capsys.readouterr().out
    assert "MistralForCausalLM: all 11 checks passed" in out and "bfloat16" in out and "sliding window    passed" in out


def test_random_weights_of_a_config_file(tiny_checkpoint, tmp_path, capsys):
    config = json.loads((tiny_checkpoint / "config.json").read_text()) | {"num_hidden_layers": 1}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert verify("--config", file, "--dtype", "float32", "--force", "--save-golden", tmp_path / "g") == 0
    assert "LlamaForCausalLM: all" in capsys.readouterr().out and (tmp_path / "g").is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--config", "tiny-llama"], 1, "there is nothing to verify: this PyTorch is not a ROCm build"),
        (["--config", "nowhere", "--force"], 1, "no config could be read from 'nowhere'"),
        (["--config", "tiny-llama", "--dtype", "int8"], 1, "there is no dtype 'int8'"),
        (["nowhere", "--force"], 1, "no model could be loaded"),
        ([], 2, "give either MODEL or --config"),
        (["--config", "tiny-llama", "--force", "--golden", "nowhere"], 1, "nowhere can't be read"),
    ],
)
def test_refusals(arguments, code, words, capsys):
    assert verify(*arguments) == code
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == ""


def test_golden_files_that_do_not_fit(tiny_checkpoint, golden, tmp_path, capsys):
    """Each is refused before anything is compared, with what is wrong with it."""
    other = LlamaForCausalLM.from_pretrained(tiny_checkpoint)
    with torch.no_grad():
        other.model.layers[2].mlp.down_proj.weight[0, 0] += 1
    other.save_pretrained(tmp_path / "other")
    cut = tmp_path / "cut"
    cut.write_bytes(golden.read_bytes()[:-100])
    plain = tmp_path / "plain"
    save_file({"a": torch.zeros(1)}, plain)
    output = "prompt/wide/0/final"
    for model, file, words in (
        (tmp_path / "other", golden, "first that differs  model.layers.2.mlp.down_proj.weight (1 in all)"),
        (tiny_checkpoint, cut, "is damaged or no golden file"),
        (tiny_checkpoint, plain, "is no golden file of this release"),
        (tiny_checkpoint, rewritten(golden, tmp_path / "config", config="0"), "its config differs"),
        (tiny_checkpoint, rewritten(golden, tmp_path / "dtype", dtype="float16"), "its dtype differs"),
        (tiny_checkpoint, rewritten(golden, tmp_path / "lacks", drop=output), "lacks a part"),
    ):
        assert verify(model, "--force", "--golden", file) == 1
        assert words in capsys.readouterr().err
