"""`hf-rocm port-check`: what in a project's own code breaks or slows it on ROCm."""

from __future__ import annotations

import textwrap
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from hf_rocm.cli.output import Counter, print_json
from hf_rocm.cli.parameters import Json
from hf_rocm.porting import Finding, Report, Severity, check

_SHOWN = 12  # places a rule, unless all are asked for


def port_check(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A file, or the folder of a project.")],
    everything: Annotated[bool, typer.Option("--all", help="Every place, however many a rule has.")] = False,
    json: Json = False,
) -> None:
    """Read the code under PATH and say what breaks or slows it on ROCm, and what to write instead.

    Nothing is run or imported. Exit code 1 if there is a problem; warnings and notes alone leave it at 0. A line with
    the comment `hf-rocm: ignore[RULE]` is left alone.
    """
    with Counter("files read") as progress:
        report = check(path, progress=progress)
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

    for (_, rule, why, instead), found in groupby(sorted(report.findings, key=key), key=key):
        places = list(found)
        print(f"{places[0].severity.value}: {rule}")
        print(textwrap.indent(textwrap.fill(why, 110), "  "))
        if instead:
            print(textwrap.fill(f"instead: {instead}", 110, initial_indent="  ", subsequent_indent="           "))
        for each in places[:shown]:
            print(f"    {each.path}:{each.line}  {each.what}")
        if shown is not None and len(places) > shown:
            print(f"    and {len(places) - shown} more (--all)")
        print()
    for file, reason in report.unread.items():
        print(f"not read: {file}: {reason}")
    print(_summary(report))


def _summary(report: Report) -> str:
    words = []
    for severity in Severity:
        number = sum(each.severity is severity for each in report.findings)
        if number:
            words.append(f"{number} {severity.value}{'s' * (number != 1)}")
    silenced = f"; {report.silenced} silenced" if report.silenced else ""
    return f"{report.files} files read: {', '.join(words) or 'nothing found'}{silenced}"
