"""The scripts' own judgement: what counts as failed, what as not run, and whether every byte is back."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]

JUNIT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"/>
<testcase name="c"><failure message="no"/></testcase>
<testcase name="d"><error message="setup"/></testcase>
<testcase name="e"><skipped message="not run: needs an AMD GPU"/></testcase>
<testcase name="f"><skipped message="only here"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def lib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from lib import environments, suites, testing, tree

    monkeypatch.setattr(suites, "REPORTS", tmp_path)
    return SimpleNamespace(environments=environments, suites=suites, testing=testing, tree=tree)


def outcome(lib: SimpleNamespace, code: int, report: str | None, **suite: bool):
    described = lib.suites.Suite("a suite", lib.environments.Environment(Path("nowhere")), (), **suite)
    if report is not None:
        lib.suites._report_file(described).write_text(report)
    return lib.suites._outcome(described, code, 1.0)


def test_a_report_is_counted(lib: SimpleNamespace) -> None:
    found = outcome(lib, 1, JUNIT)
    assert (found.passed, found.failed, found.skipped) == (2, 2, 2)
    assert dict(found.not_run) == {"needs an AMD GPU": 1}


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, -9])
def test_no_exit_code_but_zero_passes(code: int, lib: SimpleNamespace) -> None:
    assert outcome(lib, code, None).failed == (0 if code == 0 else 1)


def test_a_selection_of_the_user_may_be_empty(lib: SimpleNamespace) -> None:
    assert outcome(lib, 5, None, may_be_empty=True).failed == 0


def test_the_total_is_the_last_line_and_decides(lib: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = lib.suites.Outcome("good", passed=3, skipped=1), lib.suites.Outcome("bad", passed=1, failed=1)
    assert lib.testing.summarise([good], 0.0, everything=True) == 0
    assert capsys.readouterr().out.endswith("\n3 passed, 0 failed, 1 skipped\n")
    assert lib.testing.summarise([good, bad], 0.0, everything=True) == 1
    assert capsys.readouterr().out.endswith("\n4 passed, 1 failed, 1 skipped\n")


@pytest.mark.parametrize("change", ["content", "mode", "added", "removed"])
def test_every_change_of_a_tree_is_seen(change: str, lib: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "kept.py").write_text("1\n")
    file = tmp_path / "file.py"
    file.write_text("1\n")
    before = lib.tree.read(tmp_path)
    assert lib.tree.read(tmp_path).digest == before.digest
    if change == "content":
        file.write_text("2\n")
    elif change == "mode":
        file.chmod(0o600 if file.stat().st_mode & 0o077 else 0o644)
    elif change == "added":
        file = tmp_path / "new.py"
        file.write_text("")
    else:
        file.unlink()
    after = lib.tree.read(tmp_path)
    assert after.differing(before) == [file.name]
    assert after.digest != before.digest


def test_a_file_that_differs_from_its_wheel_is_seen(lib: SimpleNamespace, tmp_path: Path) -> None:
    file = tmp_path / "package" / "file.py"
    file.parent.mkdir()
    file.write_text("1\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"1\n").digest()).rstrip(b"=").decode()
    record = tmp_path / "package-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text(f"package/file.py,sha256={digest},2\npackage-1.0.dist-info/RECORD,,\n")
    assert lib.tree.differing_from_record(tmp_path, "package") == (1, [])
    file.write_text("1 \n")
    assert lib.tree.differing_from_record(tmp_path, "package") == (1, ["package/file.py"])


@pytest.mark.parametrize("script", ["test", "check", "demo"])
def test_a_script_explains_itself_and_refuses_what_it_does_not_know(script: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / script)]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"scripts/{script}" in done.stdout, done.stderr
    assert subprocess.run([*command, "--no-such"], capture_output=True, check=False).returncode == 2
