"""`hf-rocm status`: show the installed overlays, and whether they match the installed transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hf_rocm.cli.output import (
    print_error,
    print_json,
    print_left_out,
    print_next,
    print_states,
    print_table,
    print_transformers,
    shorten,
    transformers_dict,
)
from hf_rocm.cli.parameters import Everything, Json, Models, TransformersPath
from hf_rocm.cli.progress import Progress
from hf_rocm.overlay.state import GOOD, FileState, Installed, pip, the_others


def status(
    models: Models = None,
    transformers_path: TransformersPath = None,
    diff: Annotated[str | None, typer.Option(metavar="MODEL", help="Show what differs in one model's file.")] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="With --diff: compare with another transformers release (its wheel or folder)."
        ),
    ] = None,
    record: Annotated[
        bool,
        typer.Option(
            "--record", help="Compare every file of the transformers package with the package manager's RECORD file."
        ),
    ] = False,
    everything: Everything = False,
    json: Json = False,
) -> None:
    """Show which overlays are installed, and whether they match the installed transformers.

    Without MODEL or --all, only files that differ are listed, and the others are counted. Exits with 1 if an installed
    overlay needs attention (old, foreign, edited, or on a file that it was not made for); with --record, if a file of
    the package is missing, or neither stock nor written by this hf-rocm.
    """
    if record:
        _record(models, diff, transformers_path=transformers_path, as_json=json)
        return
    from hf_rocm.overlay.commands import status as find_states
    from hf_rocm.overlay.difference import explain_change, explain_difference

    if against and not diff:
        raise typer.BadParameter("--against selects what --diff MODEL compares with; pass both")
    named = [*(models or ()), *([diff] if diff else ())]
    installation, states, left_out = find_states(named, transformers_path=transformers_path)
    texts = {state.model: explain_difference(state) for state in states if state.model == diff}
    if against:
        texts = {state.model: explain_change(state, against) for state in states if state.model in texts}
    if json:
        print_json(
            {
                "transformers": transformers_dict(installation),
                "files": [
                    {**state.to_dict(), **({"diff": texts[state.model]} if state.model in texts else {})}
                    for state in states
                ],
                "left_out": left_out.to_dict(),
            }
        )
    else:
        print_transformers(installation)
        if states:
            print_states(states, left_out, named=bool(named), everything=everything)
        else:
            print("there are no overlays for this release, and none are installed")
            print_left_out(left_out, installation.version)
        for text in texts.values():
            print(text)
        if not texts:
            _print_next(states)
    if not all(state.good for state in states):
        raise typer.Exit(1)


def _print_next(states: Sequence[FileState]) -> None:
    odd = [state for state in states if not state.good]
    edited = [state for state in odd if state.installed is Installed.EDITED or state.match not in GOOD]
    if edited:
        print_next(f"hf-rocm status --diff {edited[0].model}")
    elif odd:
        print_next("hf-rocm install-overlays")
    elif changed := [state for state in states if state.match not in GOOD]:
        newest = changed[0].newest_checked
        rest = len(states) - len(changed)
        skip = f", or hf-rocm install-overlays --skip-changed (installs {the_others(rest)})" if rest else ""
        print_next(f"{pip(newest) if newest else f'hf-rocm status --diff {changed[0].model}'}{skip}")
    elif states and not any(state.installed is Installed.YES for state in states):
        print_next(
            "hf-rocm install-overlays (or load models with hf_rocm.from_pretrained, which needs no installation)"
        )


def _record(models: Models, diff: str | None, *, transformers_path: TransformersPath, as_json: bool) -> None:
    from hf_rocm.overlay.commands import record

    if models or diff:
        raise typer.BadParameter("--record compares the whole package; omit MODEL and --diff")
    with Progress("files compared") as progress:
        report = record(transformers_path=transformers_path, progress=progress.count)
    installation = report.installation
    if as_json:
        print_json({"transformers": transformers_dict(installation), **report.to_dict()})
    else:
        print_transformers(installation)
        rows = [
            (entry.finding.value, "shared" if entry.shared else "-", shorten(entry.path, installation.root))
            for entry in report.entries
        ]
        if rows:
            print_table(("finding", "hard links", "file"), rows)
        others = len(report.entries) - len(report.foreign)
        overlaid = f", {others} with a block of hf-rocm appended" if others else ""
        foreign = f"{len(report.foreign)} missing, or neither stock nor written by this hf-rocm"
        print(f"{report.compared} files compared{overlaid}; {foreign}")
    if report.warning:
        print_error(report.warning)
    if report.foreign:
        raise typer.Exit(1)
