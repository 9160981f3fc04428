"""`hf-rocm verify`: exit codes, output, and usable and unusable golden files."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import stat
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from hf_rocm.cli import main
from hf_rocm.errors import GoldenError, LoadError
from hf_rocm.tools.verify import verify as verify_model
from hf_rocm.tools.verify.golden import FORMAT
from hf_rocm.tools.verify.shapes import SHAPES, random_model
from tests.tools.verify import faults


def verify(*arguments):
    return main(["verify", *map(str, arguments), "--device", "cpu", "--quick"])


@pytest.fixture(scope="module")
def golden(tiny_checkpoint, tmp_path_factory):
    """A golden file of the stock model, recorded without ROCm and without force."""
    file = tmp_path_factory.mktemp("golden") / "tiny.safetensors"
    assert verify(tiny_checkpoint, "--save-golden", file) == 0
    return file


def rewritten(golden, file, *, drop="", **changes):
    """The golden file with a changed header, or without one of its tensors."""
    with safe_open(golden, framework="pt") as opened:
        header = json.loads(opened.metadata()[FORMAT])
        tensors = {name: opened.get_tensor(name) for name in opened.keys() if name != drop}  # noqa: SIM118
    save_file(tensors, file, {FORMAT: json.dumps({**header, **changes})})
    return file


def test_a_shape_of_bench_is_refused_before_accessing_the_hub(monkeypatch, capsys):
    tried = []
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda name, **_: tried.append(name))
    assert verify("--config", "small", "--force") == 1
    err = capsys.readouterr().err
    assert "--config small is a shape that only `hf-rocm bench` accepts" in err and "tiny-llama" in err and tried == []


def test_a_dtype_without_a_config_is_a_usage_error(tiny_checkpoint, capsys):
    assert verify(tiny_checkpoint, "--force", "--dtype", "float16") == 2
    assert "--dtype needs --config" in capsys.readouterr().err


def test_the_report_of_a_model_that_passes_has_at_most_25_lines(tiny_checkpoint, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["verify", str(tiny_checkpoint), "--force", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) <= 80
    assert "  aiter needs an AMD GPU" in "\n".join(lines), "the operations that share a reason are listed"


def test_a_checkpoint_is_verified_with_a_chart(tiny_checkpoint, golden, tmp_path, capsys):
    picture = tmp_path / "picture.svg"
    capsys.readouterr()
    assert verify(tiny_checkpoint, "--force", "--golden", golden, "--picture", picture, "--json") == 0
    printed = capsys.readouterr().out
    data = json.loads(printed)
    checks = {check["name"]: check for check in data["checks"]}
    assert data["passed"] and len(data["layers"]) == 4
    # docs/amd-owners.md recommends attaching the JSON output to an issue
    private = {platform.node(), getpass.getuser(), str(Path.home()), str(tiny_checkpoint.parent), str(tmp_path)}
    assert not [word for word in private if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", printed)]
    assert not re.search(r"(?<![\w.])/\w+/\w+", printed), "the output contains a path"
    assert checks["golden prompt"]["status"] == checks["golden padded batch"]["status"] == "passed"
    assert "same versions on the same kind of device" in checks["golden prompt"]["note"]
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize("path", ["{folder}/missing/g", "", "{folder}", "{folder}/file/g"])
@pytest.mark.parametrize("option", ["--save-golden", "--picture"])
def test_an_output_that_cannot_be_written_is_refused_before_the_run(tmp_path, option, path, capsys, monkeypatch):
    monkeypatch.setattr("hf_rocm.cli.verify._loaded", lambda *arguments, **kwargs: pytest.fail("a model was loaded"))
    (tmp_path / "file").touch()
    assert verify("--config", "tiny-llama", option, path.format(folder=tmp_path)) == 1
    err = capsys.readouterr().err
    assert "can't be written" in err and "hint: specify a file" in err


def test_without_rocm_and_force_nothing_is_loaded(tiny_checkpoint, golden, capsys, monkeypatch):
    monkeypatch.setattr("hf_rocm.cli.verify._loaded", lambda *arguments, **kwargs: pytest.fail("a model was loaded"))
    for arguments in ((tiny_checkpoint,), ("--config", "tiny-llama"), (tiny_checkpoint, "--golden", golden)):
        capsys.readouterr()
        assert verify(*arguments) == 1
        err = capsys.readouterr().err
        assert "there is nothing to verify" in err and "--force" in err


def test_a_line_on_stderr_precedes_the_loading_of_the_model(tiny_checkpoint, capsys, monkeypatch):
    def loaded(*arguments, **kwargs):
        print("loading", file=sys.stderr)
        raise LoadError("no model")

    monkeypatch.setattr("hf_rocm.cli.verify._loaded", loaded)
    assert verify(tiny_checkpoint, "--force") == 1
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert re.search(f"comparing .*{tiny_checkpoint.name}.* minutes", first) and second == "loading"


def test_a_golden_file_can_be_a_device_or_a_link(golden, tiny_checkpoint, tmp_path):
    (tmp_path / "link").symlink_to("target")
    assert verify(tiny_checkpoint, "--save-golden", tmp_path / "link") == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").stat().st_size == golden.stat().st_size
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.open("wb").close()
    except PermissionError:
        device = Path("/dev/null")
    assert verify(tiny_checkpoint, "--save-golden", device) == 0
    assert stat.S_ISCHR(device.stat().st_mode)


def test_the_python_interface_refuses_an_unwritable_golden_file_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_rocm.tools.verify.run.cases", lambda *arguments, **kwargs: pytest.fail("it ran"))
    model = random_model("tiny-llama", dtype="float32", device=torch.device("cpu"))
    with pytest.raises(GoldenError, match="can't be written"):
        verify_model(model, force=True, save_golden=tmp_path / "missing" / "g")


def test_a_fault_causes_exit_code_1_and_its_layer_is_named(tiny_checkpoint, golden, capsys):
    with faults.replaced("rope", faults.first_rows_positions):
        assert verify(tiny_checkpoint, "--force", "--golden", golden) == 1
    out = capsys.readouterr().out
    assert re.search(r"^padded batch +failed", out, re.M) and "golden padded batch" in out
    assert "model.layers.0: self_attn.rotated query is the first error above its bound" in " ".join(out.split())


def test_help_names_every_shape(capsys):
    assert main(["verify", "--help"]) == 0
    words = capsys.readouterr().out.replace(",", " ").replace(".", " ").split()
    assert {word for word in words if word.startswith("tiny-")} == set(SHAPES)


def test_a_named_shape_is_verified_with_random_weights(capsys):
    assert verify("--config", "tiny-mistral", "--force") == 0
    out = capsys.readouterr().out
    assert "MistralForCausalLM: all 12 checks passed" in out and "bfloat16" in out
    assert re.search(r"^sliding window +passed", out, re.M)


def test_a_config_file_is_verified_with_random_weights(tiny_checkpoint, tmp_path, capsys):
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
        (["--config", "tiny-lama", "--force"], 1, "did you mean tiny-llama?"),
        (["--config", "tiny-llama", "--dtype", "int8", "--force"], 1, "there is no dtype 'int8'"),
        (["nowhere", "--force"], 1, "no model could be loaded"),
        ([], 2, "pass either MODEL or --config"),
        (["--config", "tiny-llama", "--force", "--golden", "nowhere"], 1, "nowhere can't be read"),
    ],
)
def test_invalid_arguments_are_refused(arguments, code, words, capsys):
    assert verify(*arguments) == code
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == ""


def test_unusable_golden_files_are_refused(tiny_checkpoint, golden, tmp_path, capsys):
    """Every file is refused with a reason before anything is compared."""
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
        (tiny_checkpoint, cut, "is damaged or not a golden file"),
        (tiny_checkpoint, plain, "is not a golden file of this release"),
        (tiny_checkpoint, rewritten(golden, tmp_path / "config", config="0"), "its config differs"),
        (tiny_checkpoint, rewritten(golden, tmp_path / "dtype", dtype="float16"), "its dtype differs"),
        (tiny_checkpoint, rewritten(golden, tmp_path / "lacks", drop=output), "is incomplete"),
    ):
        assert verify(model, "--force", "--golden", file) == 1
        assert words in capsys.readouterr().err
