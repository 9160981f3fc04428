"""Run pytest suites in the environments of their releases, and read their reports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lib.console import duration, echo, line, live, styled
from lib.environments import ENVIRONMENTS, ROOT, Environment, clean_environ

REPORTS = ENVIRONMENTS / "reports"
# Seconds between progress lines if a line can't be redrawn.
HEARTBEAT = 30.0
# Seconds after which a test counts as hanging: its stacks are printed, and its suite ends.
TEST_TIMEOUT = 900.0

# pytest's exit codes: all tests passed, some failed, there were no tests. With any other code, the suite itself failed.
PASSED, FAILED, EMPTY = 0, 1, 5


@dataclass(frozen=True)
class Suite:
    """Some tests to run in one environment."""

    name: str
    environment: Environment
    arguments: tuple[str, ...]
    may_be_empty: bool = False


@dataclass
class Outcome:
    """The result of a suite or a check."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    not_run: Counter[str] = field(default_factory=Counter)
    note: str = ""


def run_all(suites: Sequence[Suite]) -> list[Outcome]:
    """Run suites in parallel, one per core; a single one writes directly to the terminal."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    if len(suites) == 1:
        return [_run_in_view(suites[0])]
    waiting, running, done = list(suites), list[_Running](), list[Outcome]()
    last_output = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < max(1, os.cpu_count() or 1):
                running.append(_Running(waiting.pop(0)))
            time.sleep(0.2)
            for child in [child for child in running if child.process.poll() is not None]:
                running.remove(child)
                done.append(child.finish())
            if running and (live() or time.monotonic() - last_output > HEARTBEAT):
                last_output = time.monotonic()
                _heartbeat(running)
    finally:
        for child in running:
            child.process.terminate()
    order = [suite.name for suite in suites]
    return sorted(done, key=lambda outcome: order.index(outcome.name))


class _Running:
    """A suite whose output goes to a log, which is shown only if something failed."""

    def __init__(self, suite: Suite) -> None:
        self.suite = suite
        self.log = REPORTS / f"{_slug(suite)}.log"
        self.began = time.monotonic()
        with self.log.open("w") as output:
            self.process = _start(suite, output)

    def progress(self) -> str:
        """The suite's name and the last percentage that pytest printed."""
        marks = re.findall(r"\[ *(\d+%)\]", self.log.read_text(errors="replace"))
        return f"{self.suite.name} {marks[-1] if marks else '0%'}"

    def finish(self) -> Outcome:
        outcome = _outcome(self.suite, self.process.returncode, time.monotonic() - self.began)
        if live():
            print("\x1b[2K", end="")
        _report(outcome)
        if outcome.failed:
            self._show()
        return outcome

    def _show(self) -> None:
        """Show the failures in the log, or the whole log if pytest did not report any."""
        text = self.log.read_text(errors="replace")
        match = re.search(r"^=+ (ERRORS|FAILURES) =+$", text, re.MULTILINE)
        echo(text[match.start() :] if match else text)
        echo(f"  full log: {self.log.relative_to(ROOT)}")


def _run_in_view(suite: Suite) -> Outcome:
    began = time.monotonic()
    process = _start(suite, None)
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        raise
    outcome = _outcome(suite, code, time.monotonic() - began)
    _report(outcome)
    return outcome


def _start(suite: Suite, output: object) -> subprocess.Popen[bytes]:
    _report_file(suite).unlink(missing_ok=True)
    # with -I and appended paths, the installed wheel is tested, never the checkout (conftest.py handles child
    # processes)
    command = [suite.environment.python, "-I", "-m", "pytest", "--import-mode", "append"]
    command += ["--junit-xml", _report_file(suite), "-o", "junit_family=xunit2"]
    command += ["-o", f"cache_dir={suite.environment.path / 'pytest-cache'}"]
    command += ["-o", f"faulthandler_timeout={TEST_TIMEOUT}", "-o", "faulthandler_exit_on_timeout=true"]
    if output is None and live():
        command.append("--color=yes")
    return subprocess.Popen(
        [*map(str, command), *suite.arguments],
        cwd=ROOT,
        env=clean_environ(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1"),
        stdin=subprocess.DEVNULL,
        stdout=output if output is not None else sys.stdout,  # type: ignore[arg-type]
        stderr=subprocess.STDOUT,
    )


def _outcome(suite: Suite, code: int, seconds: float) -> Outcome:
    outcome = Outcome(suite.name, seconds=seconds)
    report = _report_file(suite)
    if report.exists():
        _count(outcome, report)
    if code not in (PASSED, FAILED) and not (code == EMPTY and suite.may_be_empty):
        outcome.failed += 1
        outcome.note = "no tests were found" if code == EMPTY else f"pytest ended with exit code {code}"
    elif code == FAILED and not outcome.failed:
        outcome.failed = 1
        outcome.note = (
            "a failure that is not in the report" if report.exists() else "ended without a report: did a test hang?"
        )
    return outcome


def _count(outcome: Outcome, report: Path) -> None:
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed += 1
        elif skipped is not None:
            outcome.skipped += 1
            reason = skipped.get("message", "")
            if reason.startswith("not run: "):
                outcome.not_run[reason.removeprefix("not run: ")] += 1
        else:
            outcome.passed += 1


def _report(outcome: Outcome) -> None:
    words = [f"{outcome.passed} passed"]
    words += [f"{outcome.failed} failed"] if outcome.failed else []
    words += [f"{outcome.skipped} skipped"] if outcome.skipped else []
    words += [outcome.note] if outcome.note else []
    line(outcome.name, ", ".join(words), "red" if outcome.failed else "green", outcome.seconds)


def _heartbeat(running: Sequence[_Running]) -> None:
    longest = max(time.monotonic() - child.began for child in running)
    text = f"  {' · '.join(child.progress() for child in running)} · {duration(longest)}"
    if live():
        print(f"\r\x1b[2K{styled(text, 'dim')}", end="\r", flush=True)
    else:
        echo(text)


def _report_file(suite: Suite) -> Path:
    return REPORTS / f"{_slug(suite)}.xml"


def _slug(suite: Suite) -> str:
    return suite.name.replace(" ", "-").replace(",", "")
