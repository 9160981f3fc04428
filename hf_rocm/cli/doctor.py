"""`hf-rocm doctor`: report whether this machine is ready, and what to fix."""

from __future__ import annotations

import re
import sys
from typing import Annotated

import typer

from hf_rocm.cli.output import print_json, print_wrapped, styled
from hf_rocm.cli.parameters import Json
from hf_rocm.cli.progress import Progress
from hf_rocm.tools.doctor.report import Finding, Level, Report
from hf_rocm.tools.wrapping import width, wrapped

_STYLES = {Level.OK: "good", Level.WARNING: "attention", Level.PROBLEM: "error"}
# If fewer columns are left next to the check's name, the text starts below it.
_NARROW = 40


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Also check whether this model (a folder, or a name on the Hub) fits."),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", "-v", help="Also list the known faults that this machine does not have."),
    ] = False,
    json: Json = False,
) -> None:
    """Check this machine: driver, ROCm, torch, aiter and transformers.

    Every finding is marked ok, warning or problem. Warnings and problems are listed with their consequence and the fix.
    Exits with 1 if there is a problem, such as no AMD GPU. Nothing is changed or downloaded, and tests that may crash
    run in separate processes.
    """
    from hf_rocm.tools.doctor.examine import doctor as examine

    with Progress() as progress:
        report = examine(model, progress=progress.step)
    if json:
        print_json(report.to_dict(everything=everything))
    else:
        _print(report, everything=everything)
    if not report.ready:
        raise typer.Exit(1)


def _print(report: Report, *, everything: bool) -> None:
    findings = report.findings + (report.others if everything else ())
    column = max((len(finding.check) for finding in findings), default=0)
    for finding in findings:
        _print_finding(finding, column)
    print()
    print_wrapped(report.verdict)


def _fix(fix: str, room: int) -> list[str]:
    """Format a fix. A bare command stays on one line, so that it can be copied; sentences and comments are wrapped."""
    if not fix:
        return []
    command, mark, comment = fix.partition("   # ")
    if re.search("[;,] ", command):
        return wrapped(" ".join(fix.split()), room, indent="fix: ", hanging="")
    return [f"fix: {command}", *(wrapped(f"# {comment}", room, indent="     ", hanging="") if mark else ())]


def _print_finding(finding: Finding, column: int) -> None:
    level = styled(f"{finding.level.value:<7}", _STYLES[finding.level], sys.stdout)
    indent = " " * (7 + 2 + column + 2)
    head = f"{level}  {finding.check:<{column}}  "
    if width() - len(indent) < _NARROW:
        print(head.rstrip())
        head = indent = " " * 4
    room = width() - len(indent)
    first, *rest = wrapped(finding.what, room, hanging="")
    print(f"{head}{first}".rstrip())
    for line in [*rest, *(wrapped(finding.means, room, hanging="") if finding.means else ())]:
        print(f"{indent}{line}")
    for line in _fix(finding.fix, room):
        print(f"{indent}{line}")
    if finding.link:
        print(f"{indent}see: {finding.link}")
