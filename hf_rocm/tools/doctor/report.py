"""The findings of `hf-rocm doctor`.

Every finding has one of three levels. Warnings and problems have a consequence and a fix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    """The severity of a finding. WARNING: lower speed or unexpected behaviour. PROBLEM: must be fixed."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One entry of the report.

    check: the name of the check, as in docs/troubleshooting.md. what: the fact, as a sentence without a full stop.
    means: the consequence, for warnings and problems. fix: a command, or instructions if no command helps. link: the
    URL of a report on the fault. shown: False for a known fault that this machine does not have, which only `--all`
    lists.
    """

    check: str
    level: Level
    what: str
    means: str = ""
    fix: str = ""
    link: str = ""
    shown: bool = True

    def to_dict(self) -> dict[str, str]:
        return {
            "check": self.check,
            "level": self.level.value,
            "what": self.what,
            "means": self.means,
            "fix": self.fix,
            "link": self.link,
        }


def ok(check: str, what: str, *, link: str = "", shown: bool = True) -> Finding:
    return Finding(check, Level.OK, what, link=link, shown=shown)


def warning(check: str, what: str, *, means: str, fix: str, link: str = "") -> Finding:
    return Finding(check, Level.WARNING, what, means, fix, link)


def problem(check: str, what: str, *, means: str, fix: str, link: str = "") -> Finding:
    return Finding(check, Level.PROBLEM, what, means, fix, link)


def counted(names: Iterable[str]) -> str:
    """Join names with their counts: `2 × this, that`."""
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in Counter(names).items())


def pluralized(count: int, name: str) -> str:
    """Return a count with its noun: `1 lock`, `2 locks`."""
    return f"{count} {name}{'s' * (count != 1)}"


@dataclass(frozen=True)
class Report:
    """All findings. machine: a summary of every component, for the heading and JSON. others: known faults that this
    machine does not have.
    """

    findings: tuple[Finding, ...]
    machine: Mapping[str, str]
    others: tuple[Finding, ...] = ()

    def of(self, level: Level) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level is level)

    @property
    def ready(self) -> bool:
        """Whether the report contains no problem."""
        return not self.of(Level.PROBLEM)

    @property
    def verdict(self) -> str:
        """The last line: whether the machine is ready, and the number of findings per level."""
        parts = []
        for level in (Level.PROBLEM, Level.WARNING):
            names = list(dict.fromkeys(finding.check for finding in self.of(level)))
            if names:
                count = len(self.of(level))
                parts.append(f"{count} {level.value}{'s' * (count != 1)} ({', '.join(names)})")
        parts.append(f"{len(self.of(Level.OK))} ok")
        return f"{'ready' if self.ready else 'not ready'}: {', '.join(parts)}"

    def to_dict(self, *, everything: bool = False) -> dict[str, object]:
        """Convert the report to built-in types. everything: include known faults that this machine does not have."""
        findings = self.findings + (self.others if everything else ())
        return {
            "ready": self.ready,
            "verdict": self.verdict,
            "machine": dict(self.machine),
            "findings": [finding.to_dict() for finding in findings],
        }
