"""Count the tests that detect an injected fault, among transformers' own tests and hf_rocm's parity tests."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lib.console import ScriptError, echo, heading, step, table
from lib.environments import ROOT
from lib.upstream_faults import FAULTS
from lib.upstream_passes import FAULTS as PLUGIN
from lib.upstream_passes import Interpreter, Pass, Result, run
from lib.upstream_tree import model_of

TRANSFORMERS, PREPARED = "transformers' tests", "hf_rocm's parity"
_PARITY_TESTS = "tests/coverage/test_forward.py"


class Detected(NamedTuple):
    """One fault in some tests of a model.

    reached: the number of tests in which the fault changed a call; noticed: the number of these tests that fail. Of
    transformers' tests, only those that pass with and without overlays are counted.
    """

    fault: str
    tests: str
    model: str
    reached: int
    noticed: int


def detect(settings: Pass, stock: Mapping[str, Result], overlaid: Mapping[str, Result]) -> list[Detected]:
    """For each fault, repeat the tests that ran a forward of hf_rocm and passed with stock and with overlays.

    settings: those of the overlaid pass.
    """
    ran = {test for test, result in overlaid.items() if sum(result.hits.values())}
    ran &= {test for test in stock if stock[test].outcome == overlaid[test].outcome == "passed"}
    left_out = tuple(test for test in overlaid if test not in ran)
    faults = []
    for fault in FAULTS:
        with step(f"{TRANSFORMERS}: {fault}"):
            results = run(replace(settings, fault=fault, left_out=left_out))
        faults += [count(fault, model, results) for model in sorted({model_of(test) for test in ran})]
    return faults


def count(fault: str, model: str, results: Mapping[str, Result]) -> Detected:
    own = [result for test, result in results.items() if model_of(test) == model and result.reached]
    return Detected(fault, TRANSFORMERS, model, len(own), sum(result.outcome != "passed" for result in own))


def parity(interpreter: Interpreter, scratch: Path, models: Sequence[str]) -> list[Detected]:
    """Like `detect`, for hf_rocm's tests that compare a model's forward passes with stock's."""
    rows = []
    for fault in FAULTS:
        log = scratch / "parity.jsonl"
        log.unlink(missing_ok=True)
        with step(f"{PREPARED}: {fault}"):
            output = _run_parity(interpreter, log, fault, models)
        if not log.is_file():
            raise ScriptError(f"pytest did not run {_PARITY_TESTS}\n\n{output[-3000:]}")
        lines = log.read_text(encoding="utf-8").splitlines()
        rows += [count_parity(fault, model, lines) for model in sorted(models)]
    return rows


def count_parity(fault: str, model: str, lines: Sequence[str]) -> Detected:
    """The results for one model in a log of `upstream_faults`."""
    before, changed, failed = 0, set(), set()
    for line in lines:
        entry = json.loads(line)
        if entry["reached"] > before:
            changed.add(entry["test"])
        before = entry["reached"]
        if entry["outcome"] == "failed":
            failed.add(entry["test"])
    own = {test for test in changed if re.search(rf"\[{model}-(torch\.|left|right)", test)}
    return Detected(fault, PREPARED, model, len(own), len(own & failed))


def print_detected(detected: Sequence[Detected]) -> None:
    """Print one row per fault and one column per model and kind of tests: the failures among the reached tests."""
    if not detected:
        return
    heading("injected faults: failing tests among the tests that each fault reached")
    columns = list(dict.fromkeys((row.tests, row.model) for row in detected))
    rows = []
    for fault in dict.fromkeys(row.fault for row in detected):
        cells = {(row.tests, row.model): row for row in detected if row.fault == fault}
        row = (cells.get(column) for column in columns)
        rows.append((fault, *("-" if cell is None else f"{cell.noticed} of {cell.reached}" for cell in row)))
    table(("", *(f"{model}, {tests}" for tests, model in columns)), rows)
    echo()


def _run_parity(interpreter: Interpreter, log: Path, fault: str, models: Sequence[str]) -> str:
    command = [interpreter.python, "-m", "pytest", "-q", "--tb=no", "-p", PLUGIN.stem, "-p", "no:cacheprovider"]
    command += [_PARITY_TESTS, "-k", " or ".join(models)]
    environ = interpreter.environ(
        PLUGIN.parent, ROOT, UPSTREAM_FAULT=fault, UPSTREAM_FAULT_LOG=str(log), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1"
    )
    result = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    return result.stdout + result.stderr
