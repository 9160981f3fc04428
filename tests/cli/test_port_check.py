"""The command `hf-rocm port-check`: output and exit codes."""

from __future__ import annotations

import json
import os

from hf_rocm.cli import main
from hf_rocm.tools.porting.rules import RULES
from tests.tools.porting.patterns import PLANTED


def test_a_problem_is_explained_and_exits_with_one(tmp_path, capsys):
    (tmp_path / "a.py").write_text("import pynvml\n" * 14)
    assert main(["port-check", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("problem: nvidia-only-import\n  NVML: the file can't be imported")
    assert "    a.py:1  import pynvml\n" in out and "and 2 more (--all)" in out
    assert out.endswith("rules, 1 file read: Python 1\n14 problems\n"), "the verdict is not last"
    assert main(["port-check", str(tmp_path), "--all"]) == 1
    assert "a.py:14" in capsys.readouterr().out


def test_warnings_alone_exit_with_zero(tmp_path, capsys):
    (tmp_path / "a.py").write_text("import torch\ntorch.backends.cudnn.benchmark = True\n")
    assert main(["port-check", str(tmp_path)]) == 0
    assert "1 warning" in capsys.readouterr().out


def test_skipped_files_are_counted_with_the_reason(tmp_path, capsys):
    (tmp_path / ".git").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "picture.png").write_text("")
    (tmp_path / "notes.md").write_text("nvidia-smi\n")
    for name in ("Dockerfile", "Dockerfile.rocm"):
        (tmp_path / name).write_text("FROM nvidia/cuda:12\n")
    assert main(["port-check", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "Dockerfile.rocm:1" in out and "Dockerfile:1" not in out
    assert "left out: .git/: not part of the project" in out
    assert "left out: Dockerfile: Dockerfile.rocm is its counterpart for ROCm" in out
    assert "no rules for 2 files: .md 1, .png 1" in out
    assert out.endswith(f"{len(RULES)} rules, 2 files read: Dockerfile 1, Python 1\n1 problem\n")
    assert main(["port-check", str(tmp_path), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["rules"] == len(RULES) and {"kind": "Python", "files": 1} in data["read"]
    assert data["left_out"][0] == {"path": ".git/", "why": "not part of the project"}
    assert data["without_rules"] == [{"suffix": ".md", "files": 1}, {"suffix": ".png", "files": 1}]


def test_lines_fit_eighty_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for file in ("a.py", "a.cu", "a.sh"):
        texts = [text for _, name, text in PLANTED if name == file]
        for number, text in enumerate(texts):
            (tmp_path / f"{number}{file}").write_text(text)
    main(["port-check", str(tmp_path), "--all"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 100 and not [line for line in lines if len(line) > 80 and len(line.split()) > 2]


def test_json_contains_findings_and_unread_files(tmp_path, capsys):
    (tmp_path / "a.py").write_text("import pynvml\n")
    (tmp_path / "b.py").write_text("def f(:\n")
    assert main(["port-check", str(tmp_path), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["files"] == 1 and list(data["unread"]) == ["b.py"]
    assert data["findings"][0]["line"] == 1 and data["findings"][0]["severity"] == "problem"


def test_an_unreadable_file_is_named(tmp_path, capsys):
    (tmp_path / "b.py").write_text("def f(:\n")
    assert main(["port-check", str(tmp_path)]) == 0
    assert "not read: b.py: this Python" in capsys.readouterr().out


def test_a_missing_path_has_a_hint(tmp_path, capsys):
    assert main(["port-check", str(tmp_path / "nowhere")]) == 1
    assert "hint: pass a file or a folder" in capsys.readouterr().err


def test_names_and_lines_are_printed_without_control_characters(tmp_path, capsys):
    (tmp_path / "a\x1b]0;owned\x07.py").write_text("import pynvml\n")
    (tmp_path / "b\x1b[2J.py").write_text("def f(:\n")
    (tmp_path / "c.cu").write_text('asm volatile("bar.sync 0;"); // \x1b[31m\n asm("mov.u32 %0;") \x9b2J\n')
    (tmp_path / "d\u202eyp.py").write_text("import pynvml\n")
    assert main(["port-check", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert "a\\x1b]0;owned\\x07.py:1" in out and "not read: b\\x1b[2J.py" in out and "\\x9b2J" in out
    assert "d\\u202eyp.py:1" in out
    assert main(["port-check", str(tmp_path / "no\x1b[2Jwhere")]) == 1
    assert "no\\x1b[2Jwhere" in capsys.readouterr().err


def test_a_file_name_that_is_not_utf8_is_escaped(tmp_path, capfdbinary):
    name = os.fsdecode(b"caf\xe9.py")
    (tmp_path / name).write_text("import pynvml\n")
    assert main(["port-check", str(tmp_path)]) == 1
    assert b"caf\\udce9.py:1" in capfdbinary.readouterr().out
    assert main(["port-check", str(tmp_path), "--json"]) == 1
    assert json.loads(capfdbinary.readouterr().out)["findings"][0]["path"] == name
    assert main(["port-check", str(tmp_path / name)]) == 1
