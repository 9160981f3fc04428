"""Injected faults: every fault changes only the calls that it targets, and the tests that detect it are counted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
LLAMA, GEMMA = (f"tests/models/{name}/test_modeling_{name}.py::T::" for name in ("llama", "gemma"))

PLANTED = """
import sys, json, torch
sys.path.insert(0, sys.argv[1])
import upstream_faults
from hf_rocm import ops
torch.manual_seed(0)
q, k, v, x = (torch.randn(1, 2, 9, 8) for _ in range(4))
angles = torch.randn(1, 9, 8)
padded = torch.ones(9, 9, dtype=torch.bool).tril() & (torch.arange(9) > 2)
padded |= torch.eye(9, dtype=torch.bool)
sliding = torch.ones(9, 9, dtype=torch.bool).tril().triu(-3)
added = torch.zeros(9, 9).masked_fill(~sliding, -1e9)
def run():
    return {
        "plain": ops.attention(q, k, v, scale=0.3, causal=True)[0],
        "window": ops.attention(q, k, v, scale=0.3, causal=True, window=3)[0],
        "padded": ops.attention(q, k, v, scale=0.3, causal=False, mask=padded[None, None])[0],
        "sliding": ops.attention(q, k, v, scale=0.3, causal=False, mask=sliding[None, None])[0],
        "added": ops.attention(q, k, v, scale=0.3, causal=False, mask=added[None, None])[0],
        "causal": ops.attention(q, k, v, scale=0.3, causal=False, mask=sliding.new_ones(9, 9).tril()[None, None])[0],
        "rope": ops.rope(q, k, angles.cos(), angles.sin())[0],
        "norm": ops.rms_norm(0.1 * x, torch.ones(8), eps=1e-4),
    }
before = run()
upstream_faults._plant(sys.argv[2])
after = run()
print(json.dumps([[name for name in before if not torch.equal(before[name], after[name])], upstream_faults.reached]))
"""
CHANGED = {
    "attention scale × 1.5": ["plain", "window", "padded", "sliding", "added", "causal"],
    "rope dropped": ["rope"],
    "window dropped": ["window", "sliding", "added"],
    "mask dropped": ["padded", "sliding", "added"],
    "norm's eps × 1000": ["norm"],
    "norm's one_plus": ["norm"],
}


@pytest.fixture
def lib(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from lib import upstream_detected, upstream_faults, upstream_passes

    return SimpleNamespace(detected=upstream_detected, faults=upstream_faults, passes=upstream_passes)


@pytest.mark.parametrize("fault", CHANGED)
def test_a_fault_changes_its_own_calls_and_no_others(fault: str) -> None:
    command = [sys.executable, "-c", PLANTED, str(ROOT / "scripts" / "lib"), fault]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    changed, reached = json.loads(result.stdout)
    assert changed == CHANGED[fault] and reached == len(changed)


def test_every_fault_is_tested(lib: SimpleNamespace) -> None:
    assert list(lib.faults.FAULTS) == list(CHANGED)


def test_only_passing_tests_that_ran_hf_rocm_are_run_again(
    lib: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = lib.passes.Result
    hits = Counter({"LlamaMLP": 1})
    stock = {LLAMA + name: result("passed") for name in "abcd"} | {LLAMA + "e": result("failed")}
    overlaid = {LLAMA + "a": result("passed", hits=hits), LLAMA + "b": result("passed")}
    overlaid |= {LLAMA + "c": result("failed", hits=hits), LLAMA + "d": result("passed", hits=hits)}
    overlaid |= {LLAMA + "e": result("passed", hits=hits)}
    requests = []

    def run(settings):
        requests.append(settings)
        return {LLAMA + "a": result("failed", reached=2), LLAMA + "d": result("passed", reached=1)}

    monkeypatch.setattr(lib.detected, "run", run)
    settings = lib.passes.Pass(lib.passes.Interpreter(Path(sys.executable)), Path(), (), Path())
    actual = lib.detected.detect(settings, stock, overlaid)
    assert [options.fault for options in requests] == list(lib.faults.FAULTS)
    assert all(set(options.left_out) == {LLAMA + "b", LLAMA + "c", LLAMA + "e"} for options in requests)
    assert {(outcome.model, outcome.reached, outcome.noticed) for outcome in actual} == {("llama", 2, 1)}


def test_a_test_that_does_not_reach_a_fault_is_not_counted(lib: SimpleNamespace) -> None:
    result = lib.passes.Result
    results = {
        LLAMA + "a": result("failed"),
        LLAMA + "b": result("crashed", reached=1),
        GEMMA + "a": result("passed", reached=1),
    }
    assert lib.detected.count("x", "llama", results)[2:] == ("llama", 1, 1)
    assert lib.detected.count("x", "gemma", results)[2:] == ("gemma", 1, 0)


def test_the_log_of_hf_rocms_tests_is_compared_test_by_test(lib: SimpleNamespace) -> None:
    first, second, third, fourth = "t[m-torch.f]", "t[m-left]", "t[m-right]", "t[m2-left]"
    phases = [
        (first, "passed", 0),
        (first, "failed", 3),
        (first, "passed", 3),
        (second, "passed", 3),
        (third, "passed", 4),
    ]
    phases += [(fourth, "failed", 9)]
    lines = [json.dumps({"test": test, "outcome": outcome, "reached": reached}) for test, outcome, reached in phases]
    assert lib.detected.count_parity("x", "m", lines)[2:] == ("m", 2, 1)
    assert lib.detected.count_parity("x", "m2", lines)[2:] == ("m2", 1, 1)


def test_the_page_shows_the_recorded_results(lib: SimpleNamespace) -> None:
    recorded = json.loads((ROOT / "docs" / "upstream-tests" / "faults.json").read_text())
    page = (ROOT / "docs" / "upstream-tests.md").read_text()
    columns = list(dict.fromkeys((cell["tests"], cell["model"]) for cell in recorded))
    for fault in lib.faults.FAULTS:
        cells = {(cell["tests"], cell["model"]): cell for cell in recorded if cell["fault"] == fault}
        row = [f"{cells[column]['noticed']} of {cells[column]['reached']}" for column in columns]
        assert f"| {fault} | {' | '.join(row)} |" in page
