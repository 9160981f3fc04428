"""`hf-rocm port-check` from the outside."""

from __future__ import annotations

import json

from hf_rocm.cli import main


def test_a_problem_is_explained_and_exits_with_one(tmp_path, capsys):
    (tmp_path / "a.py").write_text("import pynvml\n" * 14)
    assert main(["port-check", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("problem: nvidia-only-import\n  NVML: the file can't be imported")
    assert "    a.py:1  import pynvml\n" in out and "and 2 more (--all)" in out
    assert out.endswith("1 files read: 14 problems\n")
    assert main(["port-check", str(tmp_path), "--all"]) == 1
    assert "a.py:14" in capsys.readouterr().out


def test_warnings_alone_exit_with_zero(tmp_path, capsys):
    (tmp_path / "a.py").write_text("import torch\ntorch.backends.cudnn.benchmark = True\n")
    assert main(["port-check", str(tmp_path)]) == 0
    assert "1 warning" in capsys.readouterr().out


def test_json(tmp_path, capsys):
    (tmp_path / "a.py").write_text("import pynvml\n")
    (tmp_path / "b.py").write_text("def f(:\n")
    assert main(["port-check", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == 1 and list(told["unread"]) == ["b.py"]
    assert told["findings"][0]["line"] == 1 and told["findings"][0]["severity"] == "problem"


def test_an_unreadable_file_is_named(tmp_path, capsys):
    (tmp_path / "b.py").write_text("def f(:\n")
    assert main(["port-check", str(tmp_path)]) == 0
    assert "not read: b.py: this Python" in capsys.readouterr().out


def test_a_missing_path_says_what_to_do(tmp_path, capsys):
    assert main(["port-check", str(tmp_path / "nowhere")]) == 1
    assert "hint: give a file or a folder" in capsys.readouterr().err
