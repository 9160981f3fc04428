"""scripts/bench --segment never-slower: its measurements, its decision, and its exit code."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hf_rocm
from hf_rocm import ops

ROOT = Path(__file__).resolve().parents[2]
TINY = {"hidden": 64, "layers": 1, "prompt": 8, "new": 2}


@pytest.fixture
def lib(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from lib import never_slower

    return never_slower


def outcomes(lib, cases, rounds=2):
    return list(lib.measure(cases, torch.device("cpu"), lib.Size(**TINY), rounds=rounds, progress=lambda text: None))


def test_every_case_is_measured_with_correct_results_or_has_a_reason(lib, monkeypatch):
    """Also checks that only hf_rocm's side runs hf_rocm's operations."""
    served, timed = [], lib.timed

    def watched(call, device):
        with ops.recording() as routes:
            seconds = timed(call, device)
        served.append(bool(routes))
        return seconds

    monkeypatch.setattr(lib, "timed", watched)
    result = outcomes(lib, lib.CASES)
    assert [outcome.case for outcome in result] == [row.name for row in lib.CASES]
    assert len({outcome.case for outcome in result}) == len(result) >= 14
    measured = [outcome for outcome in result if outcome.left_out is None]
    assert all(outcome.case.startswith("Liger") for outcome in result if outcome not in measured)
    for outcome in measured:
        assert len(outcome.stock) == len(outcome.prepared) == 2 and min(*outcome.stock, *outcome.prepared) > 0
        assert outcome.wrong is None
    assert served == [False, True, True, False] * len(measured)
    text = lib.table(result)
    assert all(outcome.case in text for outcome in result)


@pytest.mark.parametrize(
    ("hf_rocm_times", "slower"),
    [((1.0, 1.0, 1.0), False), ((1.2, 1.3, 1.0), False), ((1.5, 1.6, 1.7), True), ((0.5, 0.5, 9.0), False)],
)
def test_slower_means_slower_beyond_the_spread(lib, hf_rocm_times, slower):
    assert lib.Outcome("a case", (1.0, 1.1, 1.2), hf_rocm_times).slower is slower


def test_a_wrong_result_is_reported(lib, monkeypatch):
    prepare = hf_rocm.prepare

    def broken(model, **arguments):
        with torch.no_grad():
            model.get_output_embeddings().weight.neg_()
        return prepare(model, **arguments)

    monkeypatch.setattr(hf_rocm, "prepare", broken)
    (finding,) = outcomes(lib, [case for case in lib.CASES if case.name == "prefill, batch 1"])
    assert "the error of its output is" in finding.wrong and "WRONG" in lib.table([finding])


@pytest.mark.parametrize(("hf_rocm_times", "code"), [(1.0, 0), (2.0, 1)])
def test_the_command_fails_if_a_case_is_slower(lib, hf_rocm_times, code, monkeypatch, capsys):
    monkeypatch.setattr(lib, "SMALL", lib.Size(**TINY))
    monkeypatch.setattr(lib, "CASES", tuple(replace(case) for case in lib.CASES if case.run == "forward"))
    sides = iter([1.0, hf_rocm_times, hf_rocm_times, 1.0] * 100)
    monkeypatch.setattr(lib, "timed", lambda call, device: next(sides))
    main = runpy.run_path(str(ROOT / "scripts" / "bench"))["main"]
    monkeypatch.setattr("sys.argv", ["bench", "--segment", "never-slower", "--device", "cpu", "--rounds", "2"])
    assert main() == code
    assert ("SLOWER" in capsys.readouterr().out) is bool(code)
