"""`hf-rocm status`: what is installed, and whether it matches."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_rocm.cli.output import print_json, print_states, print_transformers
from hf_rocm.cli.parameters import Json, Models, TransformersPath


def status(
    models: Models = None,
    transformers_path: TransformersPath = None,
    diff: Annotated[str | None, typer.Option(metavar="MODEL", help="Show what differs in one model's file.")] = None,
    json: Json = False,
) -> None:
    """Show each file on two axes: is the overlay installed, and does it match this transformers.

    Exits with 1 if an installed overlay needs attention (old, edited, or on a file that it was not made for).
    """
    from hf_rocm.overlay.commands import status as look
    from hf_rocm.overlay.difference import explain_difference

    named = [*(models or ()), *([diff] if diff else ())]
    installation, states = look(named, transformers_path=transformers_path)
    texts = {state.model: explain_difference(state) for state in states if state.model == diff}
    if json:
        print_json(
            {
                "transformers": {"path": str(installation.root), "version": installation.version},
                "files": [
                    {**state.to_dict(), **({"diff": texts[state.model]} if state.model in texts else {})}
                    for state in states
                ],
            }
        )
    else:
        print_transformers(installation)
        if states:
            print_states(states)
        else:
            print("no overlay is made for this release, and none is installed")
        for text in texts.values():
            print(f"\n{text}")
    if not all(state.good for state in states):
        raise typer.Exit(1)
