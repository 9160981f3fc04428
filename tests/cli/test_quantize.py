"""`hf-rocm quantize` on a small checkpoint: the numbers, and the refusals before loading."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from hf_rocm.cli import main


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_the_loss_is_measured_and_printed(kind, tiny_checkpoint, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    command = ["quantize", str(tiny_checkpoint), "--kind", kind, "--force", "--device", "cpu", "--text", str(text)]
    assert main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["kind"] == kind and data["layers"] == 28 and list(data["left"]) == ["lm_head"]
    loss = data["loss"]
    assert 0 < loss["mean"] < loss["largest"] and 0.9 < loss["same_choice"] <= 1
    assert loss["ratio"] == pytest.approx(loss["perplexity"][0] / loss["perplexity"][1]) == pytest.approx(1, abs=0.05)
    assert 0 < loss["divergence"] < 0.05
    assert main(command) == 0
    out = capsys.readouterr().out
    assert out.startswith("LlamaForCausalLM in int8\n" if kind == "int8" else "LlamaForCausalLM in fp8 (float8_")
    assert f"{loss['divergence']:.3g} nats" in out
    assert "not quantised × 1: it is not part of a repeated block" in out
    assert f"{loss['perplexity'][1]:.4f} before, {loss['perplexity'][0]:.4f} after" in out


def test_several_kinds_are_compared_in_a_table(tiny_checkpoint, capsys):
    command = ["quantize", str(tiny_checkpoint), "--kind", "int8,fp8,int8", "--force", "--device", "cpu"]
    command += ["--tokens", "300"]
    assert main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    before, *schemes = data["schemes"]
    assert (before["kind"], data["device"]) == ("float32", "cpu")
    assert [scheme["kind"] for scheme in schemes] == ["int8", "fp8"]
    for scheme in schemes:
        assert scheme["bytes"][0] == before["bytes"] > scheme["bytes"][1]
        assert scheme["ms_per_token"] > 0 and before["ms_per_token"] > 0
    int8, fp8 = (scheme["loss"]["divergence"] for scheme in schemes)
    assert 0 < int8 < fp8
    assert main(command) == 0
    header, *rows = capsys.readouterr().out.splitlines()[2:6]
    assert header.split() == [
        "kind",
        "layers",
        "memory",
        "ms",
        "per",
        "token",
        "same",
        "top-1",
        "divergence",
        "perplexity",
    ]
    assert [row.split()[0] for row in rows] == ["float32", "int8", "fp8"]
    perplexities = [before["perplexity"] for before in (scheme["loss"] for scheme in schemes)]
    assert [row.split()[-1] for row in rows[1:]] == [f"{actual:.4f}" for actual, _ in perplexities]
    assert rows[0].split()[-1] == f"{perplexities[0][1]:.4f}"


def test_the_model_is_written(tiny_checkpoint, tmp_path, capsys):
    out = tmp_path / "new" / "model"
    command = ["quantize", str(tiny_checkpoint), "--kind", "int8", "--force", "--device", "cpu", "--tokens", "20"]
    assert main([*command, "--out", str(out)]) == 0
    assert f"next: hf_rocm.from_pretrained({str(out)!r})" in " ".join(capsys.readouterr().out.split())
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized"
    assert AutoTokenizer.from_pretrained(out).vocab_size == AutoTokenizer.from_pretrained(tiny_checkpoint).vocab_size
    weights = out / "model.safetensors"
    assert weights.stat().st_size < 0.6 * (tiny_checkpoint / weights.name).stat().st_size
    assert main([*command, "--out", str(out)]) == 1
    assert "is not an empty folder" in capsys.readouterr().err


def test_head_also_quantises_the_output_layer(tiny_checkpoint, capsys):
    command = ["quantize", str(tiny_checkpoint), "--kind", "int8", "--force", "--device", "cpu", "--tokens", "20"]
    assert main([*command, "--head"]) == 0
    assert "layers 29 quantised, 0 unchanged" in " ".join(capsys.readouterr().out.split())


def test_kind_all_compares_every_kind(tiny_checkpoint, capsys):
    command = ["quantize", str(tiny_checkpoint), "--kind", "all", "--force", "--device", "cpu", "--tokens", "20"]
    assert main([*command, "--json"]) == 0
    kinds = [scheme["kind"] for scheme in json.loads(capsys.readouterr().out)["schemes"]]
    assert kinds == ["float32", "fp8", "int8", "int4", "int4-g64", "int4-g32", "mxfp4"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kind", "fp4", "--force"], "quantize has no kind 'fp4'"),
        (["--kind", "fp8,fp4", "--force"], "quantize has no kind 'fp4'"),
        (["--kind", "int-4", "--force"], "hint: did you mean int4?"),
        ([], "quantize is part of the ROCm path, which is disabled"),
        (["--force", "--kind", "all", "--out", "new"], "--out requires a single kind"),
        (["--force", "--text", "nowhere"], "nowhere can't be read as text"),
        (["--force"], "there is no tokenizer in"),
    ],
)
def test_refusals_come_before_loading(arguments, words, tmp_path, capsys):
    assert main(["quantize", str(tmp_path), *arguments]) == 1
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == ""


def test_hints_name_options_of_the_command(tmp_path, capsys):
    """Hints name no argument that only a Python program can pass. The JSON output has transformers' whole message."""
    assert main(["quantize", str(tmp_path)]) == 1
    assert "hint: --force " in capsys.readouterr().err
    assert main(["quantize", str(tmp_path), "--force", "--json"]) == 1
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    with pytest.raises((OSError, ValueError)) as caught:
        AutoTokenizer.from_pretrained(str(tmp_path))
    assert data["facts"]["transformers error"] == " ".join(str(caught.value).split())
    assert "save the tokenizer in the model's folder" in data["hint"] and "quantization_loss" not in captured.err
