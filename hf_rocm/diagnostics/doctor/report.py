"""What doctor found: findings on three levels, each with what it means and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    """How bad it is: in order, may cost speed or surprise, in the way."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    check: its name, also in docs/troubleshooting.md. what: the fact, one sentence without a full stop. means: what
    follows from it, for warnings and problems. fix: a command, or what to do where no command can.
    """

    check: str
    level: Level
    what: str
    means: str = ""
    fix: str = ""

    def to_dict(self) -> dict[str, str]:
        return {
            "check": self.check,
            "level": self.level.value,
            "what": self.what,
            "means": self.means,
            "fix": self.fix,
        }


def ok(check: str, what: str) -> Finding:
    return Finding(check, Level.OK, what)


def warning(check: str, what: str, *, means: str, fix: str) -> Finding:
    return Finding(check, Level.WARNING, what, means, fix)


def problem(check: str, what: str, *, means: str, fix: str) -> Finding:
    return Finding(check, Level.PROBLEM, what, means, fix)


def counted(names: Iterable[str]) -> str:
    """`2 × this, that`."""
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in Counter(names).items())


def number(count: int, name: str) -> str:
    """`1 lock`, `2 locks`."""
    return f"{count} {name}{'s' * (count != 1)}"


@dataclass(frozen=True)
class Report:
    """Everything that was found. machine: a few words on each thing that was looked at, for the heading and JSON."""

    findings: tuple[Finding, ...]
    machine: Mapping[str, str]

    def of(self, level: Level) -> tuple[Finding, ...]:
        return tuple(each for each in self.findings if each.level is level)

    @property
    def ready(self) -> bool:
        """Whether nothing is in the way."""
        return not self.of(Level.PROBLEM)

    @property
    def verdict(self) -> str:
        """The last line: ready or not, and how many of what."""
        parts = []
        for level in (Level.PROBLEM, Level.WARNING):
            names = list(dict.fromkeys(each.check for each in self.of(level)))
            if names:
                count = len(self.of(level))
                parts.append(f"{count} {level.value}{'s' * (count != 1)} ({', '.join(names)})")
        parts.append(f"{len(self.of(Level.OK))} ok")
        return f"{'ready' if self.ready else 'not ready'}: {', '.join(parts)}"

    def to_dict(self) -> dict[str, object]:
        return {
            "ready": self.ready,
            "verdict": self.verdict,
            "machine": dict(self.machine),
            "findings": [each.to_dict() for each in self.findings],
        }
