"""The command `hf-rocm tune`: output, written files, and exit codes."""

from __future__ import annotations

import json

import pytest
import torch

from hf_rocm.cli import main
from hf_rocm.ops.aiter.tables import store, table
from hf_rocm.ops.aiter.tables.columns import layout_of
from hf_rocm.tools.tuning import shapes
from tests.parity import models
from tests.tools.tuning.conftest import MI300X, fake_aiter, own_cache, row, table_text, write

__all__ = ["fake_aiter", "own_cache"]

LAYOUT = layout_of("0.1.20")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(models.save_checkpoint("llama", tmp_path_factory.mktemp("llama"), torch.bfloat16))


@pytest.fixture
def rocm(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")


def small(tmp_path):
    gemms = [shapes.Gemm(m, 4096, 512, "torch.bfloat16", False) for m in (1, 8)]
    return write(tmp_path / "shapes.csv", shapes.write(gemms))


def test_without_rocm_the_shapes_and_the_tuning_commands_are_printed(checkpoint, tmp_path, capsys):
    output = tmp_path / "mine.csv"
    arguments = ["tune", checkpoint, "--batch", "2", "--prompt", "5", "--release", "0.1.10", "--output", str(output)]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{checkpoint}: 9 shapes\n") and "10  192  64  bfloat16" in out
    assert "not tuned: this process has no AMD GPU under ROCm" in out
    assert f"hf-rocm tune --shapes {output}" in out
    assert f"python3 gradlib/gradlib/gemm_tuner.py --input_file {output} --tuned_file tuned.csv" in out
    assert output.read_text().splitlines()[0] == "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle"
    assert len(shapes.read(output)) == 9
    assert main([*arguments, "--shapes-only", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["result"] is None and len(data["shapes"]) == 9 and data["shapes"][0]["n"] == 64


def test_tuning_saves_its_results_and_is_not_repeated(fake_aiter, rocm, tmp_path, capsys):
    fake = fake_aiter("0.1.20")
    arguments = ["tune", "--shapes", str(small(tmp_path))]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert f"tuned 2 of 2 in 0 s: {store.tuned(MI300X, fake.release)}" in captured.out.replace("1 s", "0 s")
    assert captured.err.startswith("tuning 2 shapes with aiter")
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "nothing to do: all shapes are already tuned" in out and out.count("tuned\n") >= 2
    fake.behaviour.write_text("some")
    assert main([*arguments, "--again", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["result"]["tuned"] == 1
    assert "note: no kernel was found for 1 shape; see " in captured.err
    fake.behaviour.write_text("fails")
    assert main([*arguments, "--again"]) == 1
    assert "last line  RuntimeError: no GPU" in capsys.readouterr().err


def test_explain_shows_the_hit_rate(checkpoint, fake_aiter, rocm, capsys, monkeypatch):
    fake_aiter("0.1.20")
    assert main(["tune", checkpoint, "--prompt", "5"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(torch.version, "hip", None)
    assert main(["explain", checkpoint, "--device", "cpu"]) == 0
    assert "tuned GEMMs: 9 of 9 recorded shapes are in the table" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "MODEL"),
        (["model"], 2, "pass a MODEL, or a file of shapes"),
        (["--shapes", "gone.csv"], 1, "gone.csv can't be read"),
        (["x", "--batch", "0"], 1, "--batch 0 is not valid"),
        (["x", "--prompt", "1,,2"], 1, "--prompt 1,,2 is not valid"),
        (["--shapes", "S", "--engine", "guess"], 1, "there is no engine 'guess'"),
        (["--shapes", "S", "--release", "new"], 1, "'new' is not a release of amd-aiter"),
        (["--shapes", "S", "--gpu", "MI300X"], 1, "'MI300X' is not a GPU"),
        (["nothing/here"], 1, "no config could be loaded from 'nothing/here'"),
    ],
)
def test_invalid_arguments_cause_one_error(arguments, code, words, tmp_path, capsys):
    named = [str(small(tmp_path)) if argument == "S" else argument for argument in arguments]
    assert main(["tune", *named]) == code
    captured = capsys.readouterr()
    assert words in captured.err + captured.out and "Traceback" not in captured.err


def test_the_hint_for_a_float32_model_suggests_a_dtype(tmp_path, capsys):
    path = str(models.save_checkpoint("llama", tmp_path, torch.float32))
    # Discard the progress bar that transformers prints when it saves.
    capsys.readouterr()
    assert main(["tune", path, "--prompt", "5"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("note: this process has no AMD GPU under ROCm") and "--dtype bfloat16" in err
    assert main(["tune", path, "--prompt", "5", "--dtype", "bfloat16", "--shapes-only"]) == 0
    assert main(["tune", path, "--prompt", "5", "--engine", "tunableop", "--shapes-only"]) == 0


def test_shuffled_weights_are_tuned_if_supported(tmp_path, capsys):
    gemms = [shapes.Gemm(8, n, 512, "torch.bfloat16", False) for n in (4096, 100)]
    file = write(tmp_path / "shapes.csv", shapes.write(gemms))
    assert main(["tune", "--shapes", str(file), "--shuffled", "--shapes-only", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [(shape["n"], shape["shuffled"]) for shape in data["shapes"]] == [(100, False), (4096, False), (4096, True)]


def test_check_names_the_lines_with_problems(tmp_path, capsys):
    good = write(tmp_path / "good.csv", table_text(LAYOUT, row(LAYOUT), row(LAYOUT, M=9, cu_num=80)))
    bad = write(tmp_path / "bad.csv", table_text(LAYOUT, row(LAYOUT), row(LAYOUT, N="x"), row(LAYOUT, us=1)))
    assert main(["tune", "check", str(good), "--release", "0.1.20", "--gpu", "gfx942:304"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "amd-aiter 0.1.20, gfx942, 304 compute units"
    assert "  2 rows are valid" in out and "note: line 3: for gfx942, 80 compute units, not for this one" in out
    assert main(["tune", "check", str(good), str(bad), str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "  line 3: N is 'x', not an integer from 1 to 2147483647" in out
    assert "  line 4: the same shape as line 2, with another kernel or time" in out
    assert "  1 row is valid, 2 are not" in out and f"{tmp_path} is a folder" in out
    assert main(["tune", "check", str(good), "--gpu", "gfx950:256", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["files"][0]["problems"] == [{"line": 2, "text": "no row is for this GPU (gfx950, 256 compute units)"}]


def test_merge_writes_one_table_and_never_a_file_that_it_reads(fake_aiter, tmp_path, capsys, monkeypatch):
    fake_aiter("0.1.20", row(LAYOUT, M=3), row(LAYOUT, M=8))
    actual = write(tmp_path / "mine.csv", table_text(LAYOUT, row(LAYOUT, kernelName="mine")))
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(actual))
    assert main(["tune", "merge", "--output", str(tmp_path / "all.csv")]) == 0
    out = capsys.readouterr().out
    assert "2 rows for gfx942, 304 compute units, amd-aiter 0.1.20" in out
    loaded = table.read(tmp_path / "all.csv", LAYOUT, "0.1.20")
    assert [(row.key.m, row.values["kernelName"]) for row in loaded.rows] == [(8, "mine"), (3, "_ZN5aiter1kE")]
    before = actual.read_bytes()
    for target in (actual, tmp_path / "site/aiter/configs/bf16_tuned_gemm.csv", tmp_path / "site/aiter/new.csv"):
        assert main(["tune", "merge", "--output", str(target)]) == 1
    err = capsys.readouterr().err
    assert err.count("is also an input; choose another output file") == 2
    assert err.count("is inside the aiter package, which is never modified") == 1
    assert actual.read_bytes() == before
    assert main(["tune", "merge", str(actual), "--no-shipped", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["rows"] == 1 and data["tables"][0]["role"] == "yours"
    bad = write(tmp_path / "bad.csv", table_text(LAYOUT, row(LAYOUT, K="x")))
    assert main(["tune", "merge", str(bad)]) == 1
    assert "line 2  K is 'x'" in capsys.readouterr().err


def test_list_shows_all_tables_and_damaged_ones(fake_aiter, tmp_path, capsys, monkeypatch):
    assert main(["tune", "list"]) == 0
    assert "no tables yet: hf-rocm tune MODEL creates one" in capsys.readouterr().out
    fake = fake_aiter("0.1.20", row(LAYOUT))
    write(store.tuned(MI300X, fake.release), table_text(LAYOUT, row(LAYOUT), row(LAYOUT, M=9)))
    assert main(["tune", "list", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [(table["role"], table["rows"]) for table in data["tables"]] == [("tuned here", 2), ("shipped", 1)]
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(write(tmp_path / "bad.csv", table_text(LAYOUT, "x"))))
    assert main(["tune", "list"]) == 1
    data = capsys.readouterr()
    assert "line 2  expected 18 fields, as in the header, got 1" in data.err and "tuned here" in data.out
