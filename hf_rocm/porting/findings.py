"""What port-check reports: a place, a rule, and what to write instead."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum


class Severity(Enum):
    """How bad it is on ROCm, worst first."""

    PROBLEM = "problem"  # it fails, or computes something else
    WARNING = "warning"  # it can fail, or is slow
    NOTE = "note"  # it works, and is worth a look


@dataclass(frozen=True)
class Rule:
    """One thing that port-check knows. why: what happens on ROCm. instead: what to write there."""

    name: str
    severity: Severity
    why: str
    instead: str


@dataclass(frozen=True)
class Finding:
    """A rule met in a file. what: the words of this place, such as the package; why and instead: for this place."""

    path: str
    line: int
    rule: str
    severity: Severity
    what: str
    why: str
    instead: str

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "severity": self.severity.value}


@dataclass(frozen=True)
class Place:
    """Where a rule found something, before the file is known. why, instead: where they say more than the rule's."""

    rule: Rule
    line: int
    what: str
    why: str = ""
    instead: str = ""

    def within(self, path: str) -> Finding:
        """The finding that it is in this file."""
        return Finding(
            path=path,
            line=self.line,
            rule=self.rule.name,
            severity=self.rule.severity,
            what=self.what,
            why=self.why or self.rule.why,
            instead=self.instead or self.rule.instead,
        )
