"""The findings of port-check, which consist of a place, a rule, and what to write instead."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum

# The largest number of characters of a quoted line.
_SHOWN = 80


class Severity(Enum):
    """The severity on ROCm, from the most to the least severe."""

    # The code fails or returns wrong results.
    PROBLEM = "problem"
    # The code can fail or is slow.
    WARNING = "warning"
    # The code works but should be reviewed.
    NOTE = "note"


@dataclass(frozen=True)
class Rule:
    """A rule of port-check. why: what happens on ROCm. instead: what to write instead."""

    name: str
    severity: Severity
    why: str
    instead: str


@dataclass(frozen=True)
class Finding:
    """A rule that applies to a place in a file. what: what was detected there, such as a package. why, instead: the
    texts for this place."""

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
    """A finding without its path. why, instead: texts that replace the rule's, if this place needs others."""

    rule: Rule
    line: int
    what: str
    why: str = ""
    instead: str = ""

    def within(self, path: str) -> Finding:
        """Return this place as a finding in a file."""
        return Finding(
            path=path,
            line=self.line,
            rule=self.rule.name,
            severity=self.rule.severity,
            what=self.what,
            why=self.why or self.rule.why,
            instead=self.instead or self.rule.instead,
        )


def excerpt(text: str, start: int = 0, end: int = 0) -> str:
    """Return at most 80 characters of a line, without surrounding spaces. `…` marks omitted text.

    start, end: the part of `text` that must be visible, such as the span of a match. If this part is
    too long, its start is visible.
    """
    left = len(text) - len(text.lstrip())
    line, start, end = text.strip(), max(0, start - left), max(0, end - left)
    if len(line) <= _SHOWN:
        return line
    if start == 0 or end <= _SHOWN - 1:
        return f"{line[: _SHOWN - 1].rstrip()}…"
    first = min(start, max(0, (start + end - _SHOWN) // 2) + 1)
    if len(line) - first <= _SHOWN - 1:
        return f"…{line[1 - _SHOWN :].lstrip()}"
    return f"…{line[first : first + _SHOWN - 2].strip()}…"
