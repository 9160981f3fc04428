"""The state of a verification: the checks so far, and the runs that later checks use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hf_rocm.tools.verify import golden as gold
from hf_rocm.tools.verify.cases import FILLED, PADDED, PROMPT, TITLES, WINDOW, Case, window_of
from hf_rocm.tools.verify.check import NOT_RUN, Check, LayerError
from hf_rocm.tools.verify.examine import Examined, examine
from hf_rocm.tools.verify.model_under_test import Subject
from hf_rocm.tools.verify.reference import StockFailed

Progress = Callable[[str], None]

# The cases in a golden file.
GOLDEN = (PROMPT, PADDED)
# Later checks use the intermediate activations of these cases.
REUSED = (PROMPT, FILLED)


class Session:
    """The results so far. known: name → examined case, for the cases that were run."""

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
            examined = examine(self.subject, case, note=_note(self.subject, case), keep=name in REUSED)
        except StockFailed as error:
            if name == PROMPT:
                raise
            self.add(Check(name, TITLES[name], NOT_RUN, note=error.message))
            return
        self.add(examined.check)
        self.layers = self.layers or examined.layers
        self.known[name] = examined

    def golden(self, file: gold.Golden) -> None:
        self.progress("golden file")
        note = gold.difference_in_versions(file.header, self.subject)
        for name, (case, reference) in file.cases.items():
            check = examine(self.subject, case, note=note, recorded=reference).check
            self.add(replace(check, name=f"golden {name}", title=f"{case.title}, compared with the golden file"))

    def save(self, file: Path) -> None:
        self.progress("recording")
        known = {name: self.known[name] for name in GOLDEN if name in self.known}
        cases = {name: examined.case for name, examined in known.items()}
        gold.save(file, self.subject, cases, {name: examined.reference for name, examined in known.items()})


def _note(subject: Subject, case: Case) -> str:
    if case.name == WINDOW and case.window is not None:
        return f"with the window of {window_of(subject)} shortened to {case.window}"
    return ""
