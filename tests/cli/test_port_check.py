"""The command `hf-rocm port-check`: output and exit codes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from hf_rocm.cli import main
from hf_rocm.tools.porting.findings import Severity
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


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Return a folder with findings of most rules in long paths, and with files that are skipped."""
    for number, (_, name, text) in enumerate(PLANTED):
        folder = tmp_path / f"a folder with spaces and a long name {number}" / "and another with a long name"
        folder.mkdir(parents=True)
        (folder / name).write_text(text)
    (tmp_path / "most.py").write_text("import pynvml\n" * 30)
    for number in range(30):
        (tmp_path / f"broken{number}.py").write_text("\n" * number + "def f(:\n")
        (tmp_path / f"{number}.py").write_bytes(b"\xff")
        (tmp_path / f"kind.suffix{number}").write_text("")
        (tmp_path / f"{number}.Dockerfile").write_text("FROM nvidia/cuda:12\n")
        (tmp_path / f"{number}.Dockerfile.rocm").write_text("FROM rocm/pytorch\n")
        (tmp_path / str(number) / "__pycache__").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_long_report_is_a_summary_by_rule_in_twenty_five_lines(
    columns: int, many: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(many)
    assert main(["port-check", ".", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert main(["port-check", "."]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 25 and max(map(len, lines)) <= columns
    assert lines[0].split() == ["severity", "rule", "places", "first", "place"]
    rows = [line.split(maxsplit=3) for line in lines[1 : lines.index("")]]
    more = re.fullmatch("… and ([0-9]+) more rules", " ".join(rows.pop()))
    assert more and len(rows) + int(more[1]) == len({finding["rule"] for finding in findings})
    severities = [severity.value for severity in Severity]
    order = [(severities.index(severity), -int(number)) for severity, _, number, _ in rows]
    assert order == sorted(order)
    for _, rule, number, place in rows:
        same = [finding for finding in findings if finding["rule"] == rule]
        first = f"{same[0]['path']}:{same[0]['line']}"
        assert int(number) == len(same)
        assert place == first or (place[0] == "…" and first.endswith(place[1:])), "the file or the line is cut off"
    assert rows[0][1] == "nvidia-only-import"
    closing = " ".join(" ".join(lines[lines.index("") :]).split())
    assert "not read: 60 files: " in closing and "can't parse it (30)" in closing and "not UTF-8 text (30)" in closing
    assert "left out: 60 paths: " in closing and "not part of the project (30)" in closing
    assert "replaced by a counterpart for ROCm (30)" in closing
    assert "no rules for 30 files: .suffix0 1" in closing and f"{len(RULES)} rules, " in closing
    verdict = next(number for number, line in enumerate(lines) if re.match("[0-9]+ problems, ", line))
    assert lines[verdict + 1].startswith("next: hf-rocm port-check . --all")


def test_all_prints_every_finding(many: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["port-check", str(many), "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert main(["port-check", str(many), "--all"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "next:" not in out and "more (--all)" not in out
    assert not [finding for finding in findings if f"{finding['path']}:{finding['line']} " not in out]


def test_a_report_of_twenty_five_lines_is_not_summarised(tmp_path, capsys):
    text = "import torch\ntorch.backends.cudnn.benchmark = True\ntorch.backends.cudnn.benchmark = True\nimport pynvml\n"
    (tmp_path / "a.py").write_text(text)
    main(["port-check", str(tmp_path), "--all"])
    room = 25 - len(capsys.readouterr().out.splitlines())
    assert 0 < room < 12, "this test needs other findings"
    for added, full in ((room, True), (room + 1, False)):
        (tmp_path / "a.py").write_text(text + "import pynvml\n" * added)
        main(["port-check", str(tmp_path)])
        out = capsys.readouterr().out
        assert ("instead: " in out) == full and ("next: " in out) != full
        assert len(out.splitlines()) <= 25
        main(["port-check", str(tmp_path), "--all"])
        assert (out == capsys.readouterr().out) == full


def test_a_long_report_without_findings_has_no_table(tmp_path, capsys):
    for number in range(40):
        (tmp_path / f"{number} and more.py").write_text("def f(:\n")
    assert main(["port-check", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("not read: 40 files: this Python") and len(lines) <= 5
    assert "nothing found" in lines and f"next: hf-rocm port-check {tmp_path} --all" in " ".join(lines)


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
