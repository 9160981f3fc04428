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
    """Also check that only hf_rocm's side runs hf_rocm's kernels."""
    served, timed = [], lib.timed

    def watched(call, device):
        with ops.recording() as routes:
            seconds = timed(call, device)
        served.append(bool(routes))
        return seconds

    monkeypatch.setattr(lib, "timed", watched)
    found = outcomes(lib, lib.CASES)
    assert [each.case for each in found] == [each.name for each in lib.CASES]
    assert len({each.case for each in found}) == len(found) >= 14
    measured = [each for each in found if each.left_out is None]
    assert all(each.case.startswith("Liger") for each in found if each not in measured)
    for each in measured:
        assert len(each.stock) == len(each.ours) == 2 and min(*each.stock, *each.ours) > 0
        assert each.wrong is None
    assert served == [False, True, True, False] * len(measured)
    text = lib.table(found)
    assert all(each.case in text for each in found)


@pytest.mark.parametrize(
    ("ours", "slower"),
    [((1.0, 1.0, 1.0), False), ((1.2, 1.3, 1.0), False), ((1.5, 1.6, 1.7), True), ((0.5, 0.5, 9.0), False)],
)
def test_slower_means_slower_beyond_the_spread(lib, ours, slower):
    assert lib.Outcome("a case", (1.0, 1.1, 1.2), ours).slower is slower


def test_a_wrong_result_is_reported(lib, monkeypatch):
    prepare = hf_rocm.prepare

    def broken(model, **arguments):
        with torch.no_grad():
            model.get_output_embeddings().weight.neg_()
        return prepare(model, **arguments)

    monkeypatch.setattr(hf_rocm, "prepare", broken)
    (found,) = outcomes(lib, [case for case in lib.CASES if case.name == "prefill, batch 1"])
    assert "off by" in found.wrong and "WRONG" in lib.table([found])


@pytest.mark.parametrize(("ours", "code"), [(1.0, 0), (2.0, 1)])
def test_the_command_fails_if_a_case_is_slower(lib, ours, code, monkeypatch, capsys):
    monkeypatch.setattr(lib, "SMALL", lib.Size(**TINY))
    monkeypatch.setattr(lib, "CASES", tuple(replace(case) for case in lib.CASES if case.run == "forward"))
    sides = iter([1.0, ours, ours, 1.0] * 100)
    monkeypatch.setattr(lib, "timed", lambda call, device: next(sides))
    main = runpy.run_path(str(ROOT / "scripts" / "bench"))["main"]
    monkeypatch.setattr("sys.argv", ["bench", "--segment", "never-slower", "--device", "cpu", "--rounds", "2"])
    assert main() == code
    assert ("SLOWER" in capsys.readouterr().out) is bool(code)
