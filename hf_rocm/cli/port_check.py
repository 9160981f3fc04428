"""`hf-rocm port-check`: find code in a project that breaks or is slow on ROCm."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from hf_rocm.cli.output import print_json, print_wrapped, printable
from hf_rocm.cli.parameters import Json
from hf_rocm.cli.progress import Progress
from hf_rocm.tools.porting import Finding, Report, Severity, check

_SHOWN = 12  # the largest number of places per rule, skipped paths per reason, and unread suffixes, without --all


def port_check(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A file, or a project folder.")],
    everything: Annotated[bool, typer.Option("--all", help="List every place where a rule applies.")] = False,
    json: Json = False,
) -> None:
    """Find code under PATH that breaks or is slow on ROCm, and show what to write instead.

    Reads Python, notebooks, shell scripts, Dockerfiles, CMake, lists of packages and CUDA sources; nothing is run or
    imported. Exits with 1 if there is a problem, and with 0 if there are only warnings and notes. A line with the
    comment `hf-rocm: ignore[RULE]` is skipped.
    """
    with Progress("files read") as progress:
        report = check(path, progress=progress.count)
    if json:
        print_json(report.to_dict())
    else:
        _print(report, shown=None if everything else _SHOWN)
    if report.problems:
        raise typer.Exit(1)


def _print(report: Report, shown: int | None) -> None:
    order = list(Severity)

    def key(finding: Finding) -> tuple[int, str, str, str]:
        return order.index(finding.severity), finding.rule, finding.why, finding.instead

    for (_, rule, why, instead), group in groupby(sorted(report.findings, key=key), key=key):
        places = list(group)
        print(f"{places[0].severity.value}: {rule}")
        print_wrapped(why, indent="  ", hanging="")
        if instead:
            print_wrapped(f"instead: {instead}", indent="  ", hanging="         ")
        for place in places[:shown]:
            print_wrapped(printable(f"{place.path}:{place.line}  {place.what}"), indent="    ", hanging="    ")
        if shown is not None and len(places) > shown:
            print(f"    and {len(places) - shown} more (--all)")
        print()
    for file, reason in report.unread.items():
        print_wrapped(printable(f"not read: {file}: {reason}"))
    _print_skipped(report, shown)
    kinds = ", ".join(f"{kind} {number}" for kind, number in report.kinds.items())
    print_wrapped(f"{report.rules} rules, {_counted(report.files, 'file')} read{': ' if kinds else ''}{kinds}")
    print(_verdict(report))


def _print_skipped(report: Report, shown: int | None) -> None:
    reasons: dict[str, list[str]] = {}
    for path, reason in report.left_out.items():
        reasons.setdefault(reason, []).append(path)
    for reason, paths in reasons.items():
        more = f" and {len(paths) - shown} more (--all)" if shown is not None and len(paths) > shown else ""
        print_wrapped(printable(f"left out: {', '.join(paths[:shown])}{more}: {reason}"))
    if report.suffixes:
        suffixes = [f"{suffix} {number}" for suffix, number in report.suffixes.items()]
        more = f" and {len(suffixes) - shown} more kinds (--all)" if shown is not None and len(suffixes) > shown else ""
        total = _counted(sum(report.suffixes.values()), "file")
        print_wrapped(printable(f"no rules for {total}: {', '.join(suffixes[:shown])}{more}"))


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
