"""`hf-rocm doctor` end to end on recorded machines: exactly the expected problems and warnings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hf_rocm.cli import main
from hf_rocm.tools.doctor import examine
from hf_rocm.tools.doctor.machine import CommandResult, ThisMachine, read_result
from hf_rocm.tools.doctor.report import Level
from tests.tools import recorded
from tests.tools.recorded import Recorded

KINDS = {
    "mi300x",
    "mi300x-cuda-torch",
    "rx7900xtx",
    "strix-halo-override",
    "no-gpu",
    "nvidia",
    "container-without-kfd",
    "old-rocm",
    "wrong-aiter",
    "truncated-aiter",
    "stale-jit",
    "mixed-gpus",
    "wsl",
    "windows",
}


def test_at_least_a_dozen_machines_are_recorded_with_their_sources() -> None:
    assert set(recorded.NAMES) >= KINDS
    for name in recorded.NAMES:
        source = recorded.read(name)["source"]
        assert "https://" in source or "synthetic" in source or ".toml" in source, name


@pytest.mark.parametrize("name", recorded.NAMES)
def test_every_recorded_machine_has_the_expected_findings(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Recorded(name)
    monkeypatch.setattr(examine, "ThisMachine", lambda: machine)
    code = main(["doctor", "--json"])
    data = json.loads(capsys.readouterr().out)
    findings = [(finding["level"], finding["check"]) for finding in data["findings"]]
    for level in ("problem", "warning"):
        assert sorted(check for kind, check in findings if kind == level) == sorted(machine.expected[f"{level}s"])
    assert code == int(bool(machine.expected["problems"])) and data["ready"] is not bool(code)
    for finding in data["findings"]:
        assert (finding["level"] == "ok") is (not finding["means"]) is (not finding["fix"]), finding

    assert main(["doctor"]) == code
    page = re.sub(r"\s+", " ", capsys.readouterr().out)
    for words in machine.expected["output"]:
        assert words in page
    assert "this check itself failed" not in page


def test_the_text_has_the_meaning_of_every_finding_and_a_fix_on_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examine, "ThisMachine", lambda: Recorded("mi300x-cuda-torch"))
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    (start,) = [number for number, line in enumerate(lines) if line.startswith("problem  torch ")]
    assert "CUDA 12.8" in lines[start]
    assert any("models run on the CPU" in line for line in lines[start + 1 : start + 4])
    assert any(line.strip().startswith("fix: pip install") for line in lines[start + 1 : start + 4])
    assert lines[-1].startswith("not ready: 2 problems (torch, aiter-import), 1 warning (packages), ")


def test_a_narrow_terminal_shows_the_text_below_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(examine, "ThisMachine", lambda: Recorded("container-without-group"))
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert "problem  driver" in lines
    prose = [line for line in lines if "fix: " not in line and "see: " not in line]
    assert max(map(len, prose)) <= 60


def test_a_check_that_fails_is_a_warning_and_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(facts: object) -> None:
        raise ZeroDivisionError("planted")

    checks = examine.checks
    monkeypatch.setattr(checks, "CHECKS", (broken, *checks.CHECKS))
    report = examine.doctor(machine=Recorded("mi300x"))
    assert "ZeroDivisionError: planted" in report.findings[0].what
    assert report.ready and len(report.of(Level.OK)) > 10


def test_the_facts_of_a_crashed_child_are_kept_with_the_cause() -> None:
    text = json.dumps({"facts": {"version": "2.9"}, "stage": "devices", "error": None})
    assert read_result(text, CommandResult(0)).error is None
    crashed = read_result(text, CommandResult(-11))
    assert (crashed.error, crashed.stage, crashed.facts) == (
        "it was killed by signal 11",
        "devices",
        {"version": "2.9"},
    )
    assert read_result(text, CommandResult(None)).error == "it timed out"
    assert read_result('{"facts": {"ver', CommandResult(-9)).stage == "start"
    assert (
        read_result(None, CommandResult(1, err="Traceback\nImportError: no torch\n")).error == "ImportError: no torch"
    )


def test_the_child_names_the_stage_where_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "aiter.py").write_text("raise RuntimeError('ROCm version file not found')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = ThisMachine().run_task("aiter", timeout=60)
    assert (result.stage, result.error) == ("import", "RuntimeError: ROCm version file not found")


def test_the_child_lists_the_functions_that_aiter_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "aiter"
    package.mkdir()
    (package / "__init__.py").write_text("print('aiter is noisy')\ndef rms_norm(): ...\ndef silu_and_mul(): ...\n")
    (package / "tuned_gemm.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = ThisMachine().run_task("aiter", timeout=60)
    assert result.error is None and result.facts["missing"] == ["flash_attn_func", "flash_attn_varlen_func"]


def test_this_machine_is_examined_without_imports_that_may_crash() -> None:
    """The program runs in a child process, because this process has imported torch."""
    program = (
        "import sys; from hf_rocm.tools.doctor.examine import doctor; report = doctor();"
        "heavy = {'torch', 'transformers', 'triton', 'aiter'} & set(sys.modules);"
        "print(sorted(heavy), report.findings[0].check, len(report.findings) > 2)"
    )
    import subprocess
    import sys

    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["[]", "system", "True"], result.stderr


def test_the_real_torch_child_returns_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    result = ThisMachine().run_task("torch", timeout=240)
    assert result.error is None and result.facts["version"] == torch.__version__
    assert result.facts["available"] == torch.cuda.is_available()
    assert result.facts["flags"]["backends.cudnn.benchmark"] is False


def test_it_reports_whether_a_model_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 4000)
    monkeypatch.setattr(examine, "ThisMachine", lambda: Recorded("mi300x"))
    assert main(["doctor", str(tmp_path)]) == 0
    assert "fits on GPU 0" in capsys.readouterr().out
    assert main(["doctor", "org/never-downloaded"]) == 0
    assert "is not on this machine yet" in capsys.readouterr().out
