"""`hf-rocm doctor`: is this machine ready, and what is in the way?"""

from __future__ import annotations

import sys
import textwrap
from typing import Annotated

import typer

from hf_rocm.cli.output import coloured, print_json, width
from hf_rocm.cli.parameters import Json
from hf_rocm.diagnostics.doctor.report import Finding, Level, Report

_COLOURS = {Level.OK: "32", Level.WARNING: "33", Level.PROBLEM: "1;31"}


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A model's folder or name: does it fit here, too?")
    ] = None,
    json: Json = False,
) -> None:
    """Examine this machine: the driver, ROCm, torch, aiter, transformers, and what disturbs them.

    Each line is ok, a warning or a problem, and says what it means and how to mend it. Exits with 1 if there is a
    problem; that there is no AMD GPU is one. Nothing is changed, nothing is downloaded, and what may crash is tried
    in a process of its own.
    """
    from hf_rocm.diagnostics.doctor.examine import doctor as examine

    report = examine(model, progress=_progress)
    _progress("")
    if json:
        print_json(report.to_dict())
    else:
        _print(report)
    if not report.ready:
        raise typer.Exit(1)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _print(report: Report) -> None:
    column = max((len(each.check) for each in report.findings), default=0)
    for finding in report.findings:
        _print_finding(finding, column)
    print(f"\n{report.verdict}")


def _print_finding(finding: Finding, column: int) -> None:
    level = coloured(f"{finding.level.value:<7}", _COLOURS[finding.level], sys.stdout)
    indent = " " * (7 + 2 + column + 2)
    room = max(width() - len(indent), 40)
    first, *rest = _wrapped(finding.what, room)
    print(f"{level}  {finding.check:<{column}}  {first}".rstrip())
    for line in rest:
        print(f"{indent}{line}")
    if finding.means:
        print(textwrap.indent("\n".join(_wrapped(finding.means, room)), indent))
    if finding.fix:  # on one line however long it is, so that it can be copied
        print(f"{indent}fix: {finding.fix}")


def _wrapped(text: str, room: int) -> list[str]:
    return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
