"""`hf-rocm help`: show the start page, or the help of one command."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_rocm.cli.groups import SECTIONS

Command = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="COMMAND",
        help="A command such as bench, or bench ops.",
        autocompletion=lambda: [name for names in SECTIONS.values() for name in names],
    ),
]


def help(context: typer.Context, command: Command = None) -> None:
    """Show this page, or the help of a command."""
    context.find_root().command.main([*(command or ()), "--help"], prog_name="hf-rocm")
