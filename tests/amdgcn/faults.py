"""Plant one-instruction faults in the machine code and check whether the tests in tests/triton detect them.

`pytest tests/triton --machine-code gfx942 --machine-code-faults 60 --machine-code-report FILE` first runs, without
faults, the selected cases that are not in the modules `suite.LAST` and `suite.LONG`, and records which variants they
execute. Then it takes the kernels in turn and draws, from a seeded generator, one of the kernel's variants, an
instruction that a case reached, and a change. Up to `CASES` cases that execute the variant run, until one fails. The
report lists all faults with their outcomes. `--machine-code-again FILE` plants the faults of an earlier report instead.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.amdgcn import driver, equivalent, mutate, suite
from tests.amdgcn.driver import Code
from tests.amdgcn.equivalent import RecordedLaunch
from tests.amdgcn.machine import Program, UnknownInstruction

_RAISED = re.compile(r"^E\s+tests\.amdgcn\.machine\.errors\.(\w+)", re.MULTILINE)

# The maximum number of cases of a variant that run before a fault counts as not detected.
CASES = 40
# The maximum number of recorded launches per variant, for proofs.
LAUNCHES = 4
# A launch stops after this multiple of the maximum number of instructions without a fault, plus 20 000.
MAX_SLOWDOWN = 4


@dataclass(frozen=True)
class Planted:
    """The outcome of one fault.

    detected: how the first failing case failed, or None if none failed; cases: the number of cases that ran; names: the
    first three of these cases; proof: why the fault changes nothing, or None if that is not proven.
    """

    arch: str
    kernel: str
    form: str
    kind: str
    index: int
    before: str
    after: str
    detected: str | None
    cases: int
    names: tuple[str, ...]
    proof: str | None


class Faults:
    """One session: it records what the cases execute, then plants faults."""

    def __init__(self, items: Sequence[pytest.Item], seed: int) -> None:
        self.items = list(items)
        self.random = random.Random(f"{suite.arch()} {seed}")
        self.codes: dict[str, Code] = {}
        self.reached: dict[str, set[int]] = {}
        self.executed: dict[str, int] = {}
        # Variant: {case: number of executed instructions}.
        self.cases: dict[str, dict[int, int]] = {}
        self.launches: dict[str, list[RecordedLaunch]] = {}
        self.current = 0

    def watch(self, code: Code, report: Any, settings: dict[str, Any]) -> None:
        """Record a launch without a fault. Called after every such launch."""
        self.codes[code.key] = code
        self.reached.setdefault(code.key, set()).update(report.reached)
        self.executed[code.key] = max(self.executed.get(code.key, 0), report.instructions)
        cases = self.cases.setdefault(code.key, {})
        cases[self.current] = cases.get(self.current, 0) + report.instructions

    def keep(self, code: Code, space: driver.Space, kernarg: bytes, settings: dict[str, Any]) -> None:
        """Record the inputs of a launch without a fault, for proofs. Called before every such launch."""
        launches = self.launches.setdefault(code.key, [])
        if len(launches) < LAUNCHES:
            recorded = space.recorded(kernarg, settings)
            if recorded.worth_keeping:
                launches.append(recorded)

    def survey(self) -> list[str]:
        """Run every case without faults. Returns the names of the cases that fail; they are excluded."""
        passing = []
        with _registered(driver.WATCHERS, self.watch), _registered(driver.KEEPERS, self.keep):
            for number in range(len(self.items)):
                self.current = number
                if self._failure(number) is None:
                    passing.append(number)
        for key, cases in list(self.cases.items()):
            self.cases[key] = {case: count for case, count in cases.items() if case in passing}
        return [item.nodeid for number, item in enumerate(self.items) if number not in passing]

    def plant(self, count: int) -> Iterator[Planted]:
        """Plant `count` faults, taking the kernels in turn."""
        kernels: dict[str, list[str]] = {}
        for key, cases in sorted(self.cases.items()):
            if cases:
                kernels.setdefault(self.codes[key].name, []).append(key)
        names = sorted(kernels)
        for number in range(count):
            key = self.random.choice(kernels[names[number % len(names)]])
            yield self._plant_one(self.codes[key])

    def _plant_one(self, code: Code) -> Planted:
        texts = code.instructions()
        original = code.program
        for fault in mutate.drawn(texts, sorted(self.reached[code.key]), self.random):
            try:
                changed = original.with_instruction(fault.index, fault.after)
            except (UnknownInstruction, ValueError, KeyError, IndexError, TypeError):
                # The fault is not valid assembly.
                continue
            return self._try(code, fault, changed)
        raise AssertionError("drawn() is endless")

    def plant_again(self, planted: Sequence[Mapping[str, Any]]) -> Iterator[Planted]:
        """Plant the faults of an earlier session in the same instructions. If a variant has changed, use the
        nearest instruction of the kernel with the same text, preferably in the same variant. Faults without such an
        instruction are skipped."""
        for fault in planted:
            places = self._places(fault)
            if not places:
                continue
            _, key, index = min(places)
            fault = mutate.Fault(index, fault["kind"], fault["before"], fault["after"])
            code = self.codes[key]
            yield self._try(code, fault, code.program.with_instruction(index, fault.after))

    def _places(self, fault: Mapping[str, Any]) -> list[tuple[tuple[bool, int], str, int]]:
        """Return (distance, variant, index) for every instruction in which the fault can be planted."""
        places = []
        for key, code in self.codes.items():
            if code.name == fault["kernel"] and self.cases[key]:
                for index in self.reached[key]:
                    if code.program.instructions[index].text == fault["before"]:
                        distance = abs(index - fault.get("index", 0))
                        places.append(((key != fault.get("form"), distance), key, index))
        return places

    def _try(self, code: Code, fault: mutate.Fault, changed: Program) -> Planted:
        """Run up to `CASES` cases of a variant with a fault, until one fails."""
        original = code.program
        detected, ran = None, 0
        order = sorted(self.cases[code.key], key=lambda case: self.cases[code.key][case])
        # With a count of 0, launches use the same addresses as the first launches without faults.
        code.program, code.launches = changed, 0
        driver.LIMIT = MAX_SLOWDOWN * self.executed[code.key] + 20_000
        try:
            for case in order[:CASES]:
                ran += 1
                detected = self._failure(case)
                if detected is not None:
                    break
        finally:
            code.program, driver.LIMIT = original, driver.DEFAULT_LIMIT
        proof = equivalent.proof(original, changed, fault.index, self.launches[code.key]) if detected is None else None
        kind = (fault.kind, fault.index, fault.before, fault.after)
        names = tuple(self.items[case].nodeid for case in order[: min(ran, 3)])
        return Planted(code.arch, code.name, code.key, *kind, detected, ran, names, proof)

    def _failure(self, case: int) -> str | None:
        item = self.items[case]
        return _run(item, next((other for other in self.items if other.path == item.path and other is not item), None))


def run(session: pytest.Session, path: Path) -> None:
    """Replace pytest's loop over the tests, and write the report to `path`."""
    items = [item for item in session.items if item.path.stem not in {suite.LAST, *suite.LONG}]
    faults = Faults(items, session.config.getoption("--machine-code-seed"))
    began = time.monotonic()
    planted = []
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    for name in faults.survey():
        if terminal is not None:
            terminal.write_line(f"{name} fails without a fault")
    earlier, count = (session.config.getoption(f"--machine-code-{name}") for name in ("again", "faults"))
    again = [] if earlier is None else json.loads(earlier.read_text(encoding="utf-8"))
    for fault in faults.plant(count) if earlier is None else faults.plant_again(again):
        planted.append(fault)
        if terminal is not None:
            outcome = "detected" if fault.detected else "no change" if fault.proof else "NOT DETECTED"
            names = "" if fault.detected or fault.proof else f"  in {', '.join(fault.names)}"
            terminal.write_line(f"{outcome}  {fault.kernel}  {fault.before} -> {fault.after}{names}")
        path.write_text(json.dumps([asdict(fault) for fault in planted], indent=1))
    if terminal is not None:
        missed = sum(fault.detected is None and fault.proof is None for fault in planted)
        terminal.write_line(f"{len(planted)} faults, {missed} not detected, {time.monotonic() - began:.0f} s")


@contextmanager
def _registered(functions: list[Any], function: Any) -> Iterator[None]:
    functions.append(function)
    try:
        yield
    finally:
        functions.remove(function)


def _run(item: pytest.Item, following: pytest.Item | None) -> str | None:
    """Run a case without output. Returns how it failed, in one or two words, or None if it passed. following: an item
    whose fixtures are kept active."""
    from _pytest.runner import runtestprotocol

    # Tear down the fixtures of other modules.
    item.session._setupstate.teardown_exact(item)
    item._initrequest()  # type: ignore[attr-defined]
    for report in runtestprotocol(item, log=False, nextitem=following):
        if report.failed:
            text = str(report.longrepr)
            raised = _RAISED.search(text)
            return raised[1] if raised else "wrong result"
    return None
