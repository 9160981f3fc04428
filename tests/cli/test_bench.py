"""hf-rocm bench: tables, JSON, files, and refusals before anything is measured."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch
import transformers

from hf_rocm.cli import bench_shared, main
from hf_rocm.tools import drawing
from hf_rocm.tools.bench import machine, record
from tests.tools.bench.conftest import segment

TINY = ["--config", "small", "--layers", "1", "--device", "cpu", "--rounds", "1", "--prompt", "8", "--new", "4"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_run_prints_its_tables_and_writes_its_files(tmp_path, capsys):
    runs, chart = tmp_path / "runs.json", tmp_path / "chart.svg"
    arguments = ["--sides", "stock,hf_rocm", "--save", str(runs), "--chart", str(chart), "--segment", "mine"]
    assert main(["bench", *TINY, *arguments]) == 0
    captured = capsys.readouterr()
    assert "forced without ROCm" in captured.out and "measured in this run" in captured.out
    assert (
        "decode, batch 1, prompt 8, 4 new tokens: roofline" in captured.out
        and "prefill, 1 × 8 tokens: roofline" in captured.out
    )
    assert captured.out.count("\nstock ") == 2 and captured.out.count("\nhf_rocm ") == 2
    assert "uncaptured: the model is on the CPU" in captured.out
    assert "building the model" in captured.err and f"chart: {chart}" in captured.err
    (segment,) = record.load(runs)
    assert segment.name == "mine" and len(segment.results) == 2 and chart.read_text().startswith("<svg")


@pytest.mark.parametrize("pillow", [True, False])
def test_a_chart_that_is_not_written_is_named_with_the_reason(pillow, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(drawing, "can_png", lambda: pillow)
    monkeypatch.setattr(drawing, "png", lambda picture: b"a picture")
    for name in ("chart", "only.svg"):
        bench_shared.draw(segment(), tmp_path / name)
    written = sorted(file.name for file in tmp_path.iterdir())
    assert written == (["chart.png", "chart.svg", "only.svg"] if pillow else ["chart.svg", "only.svg"])
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    missing = f"note: {tmp_path / 'chart.png'} was not written: it needs Pillow (pip install pillow)"
    assert notes == ([] if pillow else [missing])


def test_the_json_output_is_only_the_segment(capsys):
    assert main(["bench", *TINY, "--kinds", "prefill", "--sides", "stock,liger,hf_rocm", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["model"]["name"] == "small, 1 layer" and data["missing"] == {"liger": "liger-kernel is not installed"}
    assert [timing["side"] for timing in data["results"][0]["timings"]] == ["stock", "hf_rocm"]


def test_defaults_on_a_cpu_are_small_and_a_notice_names_what_is_left_out(capsys, monkeypatch):
    monkeypatch.setattr(
        "hf_rocm.tools.bench.run.bench", lambda subject, cases, names, **_: pytest.fail(f"{names} {cases}")
    )
    with pytest.raises(pytest.fail.Exception) as measured:
        main(["bench", "--config", "small", "--layers", "1", "--device", "cpu"])
    assert str(measured.value).startswith("['stock', 'hf_rocm'] [Case(kind='decode', batch=1, prompt=128, new=32)")
    assert "--sides stock,compile,hf_rocm includes it" in capsys.readouterr().err


def test_the_table_fits_80_columns_and_has_no_empty_column(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["bench", *TINY, "--sides", "stock,hf_rocm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and not any("peak" in line for line in lines)
    (header,) = (line for line in lines if line.startswith("side") and "TTFT" in line)
    assert header.split()[:7] == ["side", "ms", "per", "token", "tokens/s", "×", "stock"]


def test_a_checkpoint_is_measured_with_its_own_weights(tiny_checkpoint, capsys):
    arguments = [str(tiny_checkpoint), "--device", "cpu", "--rounds", "1", "--prompt", "8", "--new", "4", "--json"]
    assert main(["bench", *arguments, "--kinds", "decode", "--sides", "stock,hf_rocm"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["model"]["weights"] == "its own" and len(data["results"]) == 1


def test_ops_lists_timed_implementations_and_the_refused_ones_only_on_request(capsys):
    arguments = ["--config", "small", "--device", "cpu", "--op", "rms_norm", "--rows", "2"]
    assert main(["bench", "ops", *arguments]) == 0
    captured = capsys.readouterr()
    assert "rms_norm: 2 × 256, roofline" in captured.out and "torch: F.rms_norm" in captured.out
    assert "aiter" not in captured.out + captured.err.replace("note", "")
    assert main(["bench", "ops", *arguments, "--refused", "--json"]) == 0
    assert {kernel["operation"] for kernel in json.loads(capsys.readouterr().out)["kernels"]} == {"rms_norm"}
    assert main(["bench", "ops", *arguments, "--refused"]) == 0
    assert "aiter: rms_norm: aiter needs an AMD GPU" in capsys.readouterr().err


def test_a_profile_lists_kernels_and_writes_a_trace(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_rocm.tools.bench.profile.STEPS", 2)
    trace = tmp_path / "trace.json"
    assert main(["bench", *TINY, "--kinds", "prefill", "--sides", "hf_rocm", "--profile", str(trace)]) == 0
    captured = capsys.readouterr()
    assert "µs per step" in captured.out and trace.exists() and str(trace) in captured.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "Usage"),
        (["--config", "small", "a-model"], 2, "pass a MODEL, or a known shape"),
        (["a-model", "--layers", "1"], 2, "--layers needs --config"),
        (["--config", "llama-9b"], 1, "there is no shape 'llama-9b'"),
        (["--config", "smal"], 1, "hint: did you mean small?"),
        ([*TINY, "--sides", "stock,fast"], 1, "'fast'"),
        ([*TINY, "--kinds", "encode"], 1, "--kinds encode"),
        ([*TINY, "--batch", "1,x"], 1, "--batch 1,x"),
        ([*TINY, "--dtype", "int8"], 1, "--dtype int8"),
        (["--config", "small", "--device", "tpu"], 1, "'tpu'"),
        ([*TINY, "--chart", "a.pdf"], 1, "a.pdf"),
        ([*TINY, "--chart", "{file}/a.svg"], 1, "a.svg can't be written"),
        ([*TINY, "--save", "{file}/a.json"], 1, "a.json can't be written"),
        ([*TINY, "--save", ""], 1, "can't be written"),
        ([*TINY, "--profile", "{file}/a/b.json"], 1, "b.json can't be written"),
        (["ops", "--config", "small", "--device", "cpu", "--save", "{file}/a.json"], 1, "a.json can't be written"),
        ([*TINY, "--save", "{file}"], 1, "is not a file of measurements"),
        (["ops", "--op", "softmax"], 1, "--op softmax"),
        (["ops", "--op", "rope,lineer"], 1, "hint: did you mean linear?"),
    ],
)
def test_invalid_arguments_are_refused_before_measuring(arguments, code, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_rocm.tools.bench.rates.measure", lambda *args: pytest.fail("it was measured"))
    file = tmp_path / "runs.json"
    file.write_text("{}")
    assert main(["bench", *(argument.replace("{file}", str(file)) for argument in arguments)]) == code
    captured = capsys.readouterr()
    assert words in captured.out + captured.err


def _checkpoint(folder, model_type, auto, **changes):
    sizes = changes or {"intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.AutoConfig.for_model(model_type, hidden_size=32, **sizes)
    getattr(transformers, auto).from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("model_type", "auto", "title"),
    [
        ("bert", "AutoModelForMaskedLM", "encoder, batch 1, 8 tokens: roofline"),
        ("vit", "AutoModelForImageClassification", "encoder, batch 1: roofline"),
    ],
)
def test_the_forwards_of_an_encoder_checkpoint_are_timed(model_type, auto, title, tmp_path, capsys):
    folder = _checkpoint(tmp_path, model_type, auto)
    assert main(["bench", folder, "--device", "cpu", "--rounds", "1", "--prompt", "8", "--sides", "stock,hf_rocm"]) == 0
    out = capsys.readouterr().out
    assert title in out and out.count("\nhf_rocm ") == 1 and "no layer is served" not in out


def test_a_side_without_a_served_layer_is_reported_as_stock(tmp_path, capsys):
    changes = {"num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]], "vocab_size": 99}
    folder = _checkpoint(tmp_path, "gpt_neo", "AutoModelForCausalLM", **changes)
    arguments = ["--device", "cpu", "--rounds", "1", "--prompt", "8", "--kinds", "prefill", "--sides", "stock,hf_rocm"]
    assert main(["bench", folder, *arguments]) == 0
    assert "hf_rocm: no layer is served, and this side runs stock" in capsys.readouterr().out


def test_other_models_are_refused(tmp_path, capsys):
    config = transformers.T5Config(d_model=32, d_ff=48, num_layers=1, num_heads=2, d_kv=16, vocab_size=99)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    assert main(["bench", str(tmp_path / "t5"), "--device", "cpu"]) == 1
    assert "has an encoder and a decoder" in capsys.readouterr().err
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "config.json").write_text(json.dumps({"model_type": "lama"}))
    for command in ("bench", "tune"):
        assert main([command, str(tmp_path / "strange")]) == 1
        assert "no model could be loaded" in capsys.readouterr().err


def test_the_commit_is_that_of_hf_rocms_checkout(tmp_path, monkeypatch):
    file = tmp_path / "hf_rocm" / "tools" / "bench" / "machine.py"
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.setattr(machine, "__file__", str(file))

    def git(*arguments):
        identity = ("-c", "user.name=name", "-c", "user.email=name@example.com")
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    # In this repository, hf_rocm is only installed, for example in a virtual environment.
    assert machine.commit() is None
    (tmp_path / "overlays").mkdir()
    head = git("rev-parse", "HEAD")[:12]
    assert machine.commit() == head
    file.write_text("# changed")
    assert machine.commit() == head + "+"
