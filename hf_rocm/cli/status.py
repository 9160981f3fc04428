"""`hf-rocm status`: what is installed, and whether it matches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_rocm.cli.output import (
    Counter,
    print_error,
    print_json,
    print_left_out,
    print_states,
    print_table,
    print_transformers,
    shorten,
    transformers_dict,
)
from hf_rocm.cli.parameters import Json, Models, TransformersPath


def status(
    models: Models = None,
    transformers_path: TransformersPath = None,
    diff: Annotated[str | None, typer.Option(metavar="MODEL", help="Show what differs in one model's file.")] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="PATH", help="With --diff: a transformers wheel or folder to compare with.")
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Compare the whole transformers package with its package record.")
    ] = False,
    json: Json = False,
) -> None:
    """Show each file on two axes: is the overlay installed, and does it match this transformers.

    Without MODEL, files in order are listed by group, and only the others one by one.
    Exits with 1 if an installed overlay needs attention (old, edited, or on a file that it was not made for), and
    with --record also if anything in the package is neither stock nor ours.
    """
    if record:
        _record(models, diff, transformers_path=transformers_path, as_json=json)
        return
    from hf_rocm.overlay.commands import status as look
    from hf_rocm.overlay.difference import explain_change, explain_difference

    if against and not diff:
        raise typer.BadParameter("--against says what --diff MODEL compares with; give both")
    named = [*(models or ()), *([diff] if diff else ())]
    installation, states, left_out = look(named, transformers_path=transformers_path)
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
            print_states(states, left_out, each=bool(named))
        else:
            print("no overlay is made for this release, and none is installed")
            print_left_out(left_out, installation.version)
        for text in texts.values():
            print(f"\n{text}")
    if not all(state.good for state in states):
        raise typer.Exit(1)


def _record(models: Models, diff: str | None, *, transformers_path: TransformersPath, as_json: bool) -> None:
    from hf_rocm.overlay.commands import record

    if models or diff:
        raise typer.BadParameter("--record looks at the whole package; leave MODEL and --diff out")
    with Counter("files compared") as progress:
        found = record(transformers_path=transformers_path, progress=progress)
    installation = found.installation
    if as_json:
        print_json({"transformers": transformers_dict(installation), **found.to_dict()})
    else:
        print_transformers(installation)
        rows = [
            (entry.finding.value, "shared" if entry.shared else "-", shorten(entry.path, installation.root))
            for entry in found.entries
        ]
        if rows:
            print_table(("finding", "hard links", "file"), rows)
        others = len(found.entries) - len(found.foreign)
        ours = f", {others} with our block below them" if others else ""
        print(f"{found.compared} files compared{ours}; {len(found.foreign)} neither stock nor ours")
    if found.warning:
        print_error(found.warning)
    if found.foreign:
        raise typer.Exit(1)
