"""`hf-rocm port-check`: find code in a project that breaks or is slow on ROCm."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from hf_rocm.cli.output import print_json, printable, table_lines
from hf_rocm.cli.parameters import Json
from hf_rocm.cli.progress import Progress
from hf_rocm.tools.porting import Finding, Report, Severity, check
from hf_rocm.tools.porting.sources import COUNTERPART
from hf_rocm.tools.wrapping import width, wrapped

# The largest number of lines without --all; a longer report is summarised.
_LINES = 25
# The largest number of places per rule, skipped paths per reason, and unread suffixes, without --all.
_SHOWN = 12
# The largest number of reasons and of unread suffixes in a summary.
_SUMMARISED = 4


def port_check(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A file, or a project folder.")],
    everything: Annotated[
        bool, typer.Option("--all", help="Print every place where a rule applies, and what to write instead.")
    ] = False,
    json: Json = False,
) -> None:
    """Find code under PATH that breaks or is slow on ROCm, and show what to write instead.

    Reads Python, notebooks, shell scripts, Dockerfiles, CMake, requirements files and CUDA sources; nothing is run or
    imported. A report of more than 25 lines is summarised by rule. Exits with 1 if there is a problem, and with 0 if
    there are only warnings and notes. A line with the comment `hf-rocm: ignore[RULE]` is skipped.
    """
    with Progress("files read") as progress:
        report = check(path, progress=progress.count)
    if json:
        print_json(report.to_dict())
    else:
        lines = list(_full(report, shown=None if everything else _SHOWN))
        print("\n".join(lines if everything or len(lines) <= _LINES else _summary(report)))
    if report.problems:
        raise typer.Exit(1)


def _full(report: Report, shown: int | None) -> Iterator[str]:
    """Yield the lines of the report. shown: the largest number of places, paths or suffixes in a list; None: all."""
    order = list(Severity)

    def key(finding: Finding) -> tuple[int, str, str, str]:
        return order.index(finding.severity), finding.rule, finding.why, finding.instead

    for (_, rule, why, instead), group in groupby(sorted(report.findings, key=key), key=key):
        places = list(group)
        yield f"{places[0].severity.value}: {rule}"
        yield from wrapped(why, width(), indent="  ", hanging="")
        if instead:
            yield from wrapped(f"instead: {instead}", width(), indent="  ", hanging="         ")
        for place in places[:shown]:
            where = printable(f"{place.path}:{place.line}  {place.what}")
            yield from wrapped(where, width(), indent="    ", hanging="    ")
        if shown is not None and len(places) > shown:
            yield f"    and {len(places) - shown} more (--all)"
        yield ""
    for file, reason in report.unread.items():
        yield from _sentence(f"not read: {file}: {reason}")
    reasons: dict[str, list[str]] = {}
    for path, reason in report.left_out.items():
        reasons.setdefault(reason, []).append(path)
    for reason, paths in reasons.items():
        more = f" and {len(paths) - shown} more (--all)" if shown is not None and len(paths) > shown else ""
        yield from _sentence(f"left out: {', '.join(paths[:shown])}{more}: {reason}")
    yield from _end(report, shown)


def _summary(report: Report) -> list[str]:
    """Return one line per rule, the number of skipped files by reason, the verdict and the next step.

    Rules that do not fit in 25 lines are only counted.
    """
    end = []
    for label, thing, reasons in (("not read", "file", report.unread), ("left out", "path", report.left_out)):
        if reasons:
            end += _sentence(f"{label}: {_counted(len(reasons), thing)}: {_by_kind(reasons.values())}")
    end += _end(report, _SUMMARISED)
    command = f"hf-rocm port-check {shlex.quote(report.path)} --all"
    end += _sentence(f"next: {command} (every place, and what to write instead)")
    rules: dict[tuple[Severity, str], list[Finding]] = {}
    for finding in report.findings:
        rules.setdefault((finding.severity, finding.rule), []).append(finding)
    if not rules:
        return end
    order = list(Severity)
    rows = sorted(rules.values(), key=lambda row: (order.index(row[0].severity), -len(row), row[0].rule))
    lines = [*_table(rows), "", *end]
    for number in range(len(rows) - 1, 0, -1):
        if len(lines) <= _LINES:
            break
        lines = [*_table(rows[:number]), f"… and {_counted(len(rows) - number, 'more rule')}", "", *end]
    return lines


def _table(rules: Sequence[Sequence[Finding]]) -> list[str]:
    """Return the lines of a table with one row per rule. rules: the findings of every rule."""
    header = ("severity", "rule", "places", "first place")
    cells = [(places[0].severity.value, places[0].rule, str(len(places))) for places in rules]
    room = width() - sum(max(map(len, column)) + 2 for column in zip(header[:3], *cells, strict=True))
    first_places = [_ending(printable(f"{places[0].path}:{places[0].line}"), room) for places in rules]
    return table_lines(header, [(*row, first) for row, first in zip(cells, first_places, strict=True)])


def _end(report: Report, shown: int | None) -> Iterator[str]:
    """Yield the numbers of files without rules, of rules that ran and of files that were read, and the verdict."""
    if report.suffixes:
        suffixes = [f"{suffix} {number}" for suffix, number in report.suffixes.items()]
        more = f" and {len(suffixes) - shown} more kinds (--all)" if shown is not None and len(suffixes) > shown else ""
        total = _counted(sum(report.suffixes.values()), "file")
        yield from _sentence(f"no rules for {total}: {', '.join(suffixes[:shown])}{more}")
    kinds = ", ".join(f"{kind} {number}" for kind, number in report.kinds.items())
    yield from _sentence(f"{report.rules} rules, {_counted(report.files, 'file')} read{': ' if kinds else ''}{kinds}")
    yield _verdict(report)


def _by_kind(reasons: Iterable[str]) -> str:
    """Return the most frequent kinds of these reasons with their counts. The details of a reason follow a colon."""
    kinds = Counter(
        "replaced by a counterpart for ROCm" if reason.endswith(COUNTERPART) else reason.split(": ")[0]
        for reason in reasons
    ).most_common()
    parts = [f"{kind} ({number})" for kind, number in kinds[:_SUMMARISED]]
    others = sum(number for _, number in kinds[_SUMMARISED:])
    return ", ".join([*parts, *([f"other reasons ({others})"] if others else [])])


def _ending(place: str, room: int) -> str:
    """Return a place, or if it is longer than `room`, `…` and its end, which starts at a slash if there is one."""
    if len(place) <= room:
        return place
    end = place[1 - room :]
    return f"…{end[max(0, end.find('/')) :]}"


def _sentence(text: str) -> list[str]:
    return wrapped(printable(text), width())


def _verdict(report: Report) -> str:
    words = []
    for severity in Severity:
        number = sum(finding.severity is severity for finding in report.findings)
        if number:
            words.append(_counted(number, severity.value))
    silenced = f"; {report.silenced} silenced" if report.silenced else ""
    return f"{', '.join(words) or 'nothing found'}{silenced}"


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"
