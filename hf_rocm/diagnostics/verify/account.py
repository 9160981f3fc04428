"""The account that grows while a model is verified: what was run, what came of it, what later checks build on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hf_rocm.diagnostics.verify import golden as gold
from hf_rocm.diagnostics.verify.cases import FILLED, PADDED, PROMPT, TITLES, WINDOW, Case, window_of
from hf_rocm.diagnostics.verify.examine import Examined, examine
from hf_rocm.diagnostics.verify.reference import StockFailed
from hf_rocm.diagnostics.verify.report import NOT_RUN, Check, LayerError
from hf_rocm.diagnostics.verify.subject import Subject

Progress = Callable[[str], None]

GOLDEN = (PROMPT, PADDED)  # cases that a golden file holds
TRIED_AGAIN = (PROMPT, FILLED)  # by the tiers


class Account:
    """What was found so far. known: by case."""

    def __init__(self, subject: Subject, progress: Progress) -> None:
        self.subject, self.progress = subject, progress
        self.checks: list[Check] = []
        self.layers: tuple[LayerError, ...] = ()
        self.known: dict[str, Examined] = {}

    def add(self, *checks: Check) -> None:
        self.checks += checks

    def case(self, name: str, case: Case | str) -> None:
        self.progress(name)
        if isinstance(case, str):
            self.add(Check(name, TITLES[name], NOT_RUN, note=case))
            return
        try:
            found = examine(self.subject, case, note=_note(self.subject, case), keep=name in TRIED_AGAIN)
        except StockFailed as error:
            if name == PROMPT:
                raise
            self.add(Check(name, TITLES[name], NOT_RUN, note=error.message))
            return
        self.add(found.check)
        self.layers = self.layers or found.layers
        self.known[name] = found

    def golden(self, found: gold.Golden) -> None:
        self.progress("golden file")
        where = gold.difference_in_versions(found.header, self.subject)
        for name, (case, reference) in found.cases.items():
            check = examine(self.subject, case, note=where, recorded=reference).check
            self.add(replace(check, name=f"golden {name}", title=f"{case.title}, beside the golden file"))

    def save(self, file: Path) -> None:
        self.progress("recording")
        known = {name: self.known[name] for name in GOLDEN if name in self.known}
        cases = {name: each.case for name, each in known.items()}
        gold.save(file, self.subject, cases, {name: each.reference for name, each in known.items()})


def _note(subject: Subject, case: Case) -> str:
    if case.name == WINDOW and case.window is not None:
        return f"with the window of {window_of(subject)} shortened to {case.window}"
    return ""
