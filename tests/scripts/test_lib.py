"""Modules of the scripts: counts of failed and skipped tests, exit codes, and the check that a tree is unchanged."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from contextlib import nullcontext
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
    from lib import checks, environments, suites, testing, tree

    monkeypatch.setattr(suites, "REPORTS", tmp_path)
    return SimpleNamespace(checks=checks, environments=environments, suites=suites, testing=testing, tree=tree)


def outcome(lib: SimpleNamespace, code: int, report: str | None, **suite: bool):
    a_suite = lib.suites.Suite("a suite", lib.environments.Environment(Path("nowhere")), (), **suite)
    if report is not None:
        lib.suites._report_file(a_suite).write_text(report)
    return lib.suites._outcome(a_suite, code, 1.0)


def test_a_report_is_counted(lib: SimpleNamespace) -> None:
    result = outcome(lib, 1, JUNIT)
    assert (result.passed, result.failed, result.skipped) == (2, 2, 2)
    assert dict(result.not_run) == {"needs an AMD GPU": 1}


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, -9])
def test_only_exit_code_zero_passes(code: int, lib: SimpleNamespace) -> None:
    assert outcome(lib, code, None).failed == (0 if code == 0 else 1)


def test_a_hanging_test_ends_its_suite_and_is_named(
    lib: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "test_hanging.py"
    file.write_text("import time\n\ndef test_that_hangs():\n    time.sleep(600)\n")
    monkeypatch.setattr(lib.suites, "TEST_TIMEOUT", 0.5)
    monkeypatch.setattr(lib.suites, "ROOT", tmp_path)
    suite = lib.suites.Suite("hanging", lib.environments.Environment(Path(sys.prefix)), (str(file),))
    (ended, _) = lib.suites.run_all([suite, suite])
    assert ended.failed == 1 and "did a test hang?" in ended.note
    assert "in test_that_hangs" in capsys.readouterr().out


def test_a_users_selection_may_be_empty(lib: SimpleNamespace) -> None:
    assert outcome(lib, 5, None, may_be_empty=True).failed == 0


def test_the_total_is_the_last_line_and_determines_the_result(
    lib: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = lib.suites.Outcome("good", passed=3, skipped=1), lib.suites.Outcome("bad", passed=1, failed=1)
    assert lib.testing.summarise([good], 0.0, everything=True) == 0
    assert capsys.readouterr().out.endswith("\n3 passed, 0 failed, 1 skipped\n")
    assert lib.testing.summarise([good, bad], 0.0, everything=True) == 1
    assert capsys.readouterr().out.endswith("\n4 passed, 1 failed, 1 skipped\n")
    assert lib.testing.summarise([lib.suites.Outcome("empty")], 0.0, everything=True) == 1, "a misspelt -k succeeds"
    assert capsys.readouterr().out.endswith("-k after --\n0 passed, 0 failed, 0 skipped\n")


def planned(lib: SimpleNamespace, *, quick: bool) -> dict[str, set[str]]:
    """The test files of each suite."""
    environment = lib.environments.Environment(Path("nowhere"))
    names = [lib.environments.NEWEST, *lib.testing.SEPARATE, *lib.environments.RUNNABLE[-2::-1]]
    files = {}
    for suite in lib.testing.plan(dict.fromkeys(names, environment), [], quick=quick):
        words = [word for word in suite.arguments if word not in ("-m", "not slow", *lib.testing.PART)]
        ignored = {words[index + 1] for index, word in enumerate(words) if word == "--ignore"}
        paths = [ROOT / word for word in words if word != "--ignore" and word not in ignored]
        assert all((ROOT / word).exists() for word in ignored) and all(index.exists() for index in paths), suite.name
        tests = {str(path.relative_to(ROOT)) for index in paths for path in [index, *index.rglob("test_*.py")]}
        files[suite.name] = {
            test
            for test in tests
            if test.endswith(".py") and not any(Path(test).is_relative_to(word) for word in ignored)
        }
    return files


@pytest.mark.parametrize("quick", [True, False])
def test_every_test_file_runs_once_with_the_newest_release(quick: bool, lib: SimpleNamespace) -> None:
    newest = [files for name, files in planned(lib, quick=quick).items() if lib.environments.NEWEST in name]
    run = [file for files in newest for file in files]
    all_files = {str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py")}
    assert set(run) == all_files - set(lib.checks.RULES)
    assert len(run) == len(set(run))


@pytest.mark.parametrize("version", ["4.53.3", "5.23.0"])
def test_one_release_runs_the_given_paths(version: str, lib: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    environments: list[tuple[str, dict[str, bool]]] = []
    suites = []
    # The process that runs this test may already hold the lock.
    monkeypatch.setattr(lib.testing, "lock", nullcontext)
    monkeypatch.setattr(lib.testing, "base", lambda: None)
    monkeypatch.setattr(lib.testing, "wheel", lambda *_: None)
    monkeypatch.setattr(lib.testing, "release", lambda name, *_, **kwargs: environments.append((name, kwargs)))
    monkeypatch.setattr(lib.testing, "run_all", lambda planned: suites.extend(planned) or [])
    assert lib.testing.main(["--release", version, "--", "tests/coverage", "-k", "mistral"]) == 0
    assert environments == [(version, {})]
    (suite,) = suites
    assert suite.name == f"transformers {version}" and suite.arguments[-1] == "tests/coverage"
    assert "mistral" in suite.arguments and "--ignore" not in suite.arguments


def test_the_order_lists_existing_suites_and_omitted_paths_exist(lib: SimpleNamespace) -> None:
    suites = planned(lib, quick=False)
    assert next(iter(suites)).endswith(lib.testing.LONGEST[0])
    for name in lib.testing.LONGEST:
        assert any(suite.endswith(name) for suite in suites), f"no suite is called {name}"
    left_out = {path for paths in lib.testing.LEFT_OUT.values() for path in paths}
    assert all((ROOT / path).exists() for path in (*left_out, *lib.testing.OWN_PROCESSES))


def test_the_types_of_the_package_the_overlays_and_the_scripts_are_checked(
    lib: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(lib.checks, "MYPY_CACHE", tmp_path)
    roots = [ROOT / argument for argument in lib.checks.typed_sources() if not str(argument).startswith("--")]
    checked = {file.resolve() for root in roots for file in (root.rglob("*.py") if root.is_dir() else [root])}
    written = {file for name in ("hf_rocm", "overlays", "scripts/lib") for file in (ROOT / name).rglob("*.py")}
    assert not written - checked
    assert {ROOT / "scripts" / name for name in ("check", "demo_worker.py")} <= checked


@pytest.mark.parametrize("change", ["content", "mode", "added", "removed"])
def test_every_change_of_a_tree_is_detected(change: str, lib: SimpleNamespace, tmp_path: Path) -> None:
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


def test_a_file_that_differs_from_its_wheel_is_detected(lib: SimpleNamespace, tmp_path: Path) -> None:
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
def test_a_script_has_help_and_refuses_unknown_options(script: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / script)]
    result = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and f"scripts/{script}" in result.stdout, result.stderr
    assert subprocess.run([*command, "--no-such"], capture_output=True, check=False).returncode == 2
