"""Record how much of every compiled kernel was executed: its launches, and the instructions that were reached."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.amdgcn.driver import Code
from tests.amdgcn.unreached import Share, shares, source_lines


@dataclass
class Executed:
    """One compiled variant. lines: the source line of every instruction. entry: the index of the instruction at which a
    launch with preloaded arguments starts, or 0. Summed over all launches: executed, the number of executed wave
    instructions; requested, the number of bytes that lanes load and store in global memory; needed, the number of
    distinct bytes in each launch."""

    kernel: str
    instructions: list[str]
    lines: list[str]
    entry: int
    reached: set[int] = field(default_factory=set)
    launches: int = 0
    executed: int = 0
    requested: int = 0
    needed: int = 0


class Record:
    """Everything that one process executed."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.forms: dict[str, Executed] = {}

    def launched(self, code: Code, report: Any, setup: dict[str, Any]) -> None:
        """Record a launch. Called after every launch."""
        form = self.forms.get(code.key)
        if form is None:
            source = source_lines(code.text), code.program.source.entry
            form = self.forms[code.key] = Executed(code.name, code.instructions(), *source)
        form.launches += 1
        form.reached |= set(report.reached)
        form.executed += report.instructions
        form.requested += report.bytes_requested
        form.needed += report.bytes_needed

    def kernels(self) -> set[str]:
        return {form.kernel for form in self.forms.values()}

    def shares(self) -> list[Share]:
        """For every kernel, the share of its code that was reached."""
        return list(shares(self.arch, map(vars, self.forms.values())))

    def write(self, path: Path) -> None:
        forms = {key: {**vars(form), "reached": sorted(form.reached)} for key, form in self.forms.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"arch": self.arch, "forms": forms}))
