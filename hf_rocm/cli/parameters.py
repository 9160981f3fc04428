"""Parameters that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Models = Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="Model folders such as llama.")]
TransformersPath = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="The transformers that is meant: its folder, or the one that holds it."),
]
ModelPath = Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, or its name on the hub.")]
DeviceName = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="Where to load it (default: the GPU, else the CPU).")
]
Force = Annotated[bool, typer.Option("--force", help="Switch the ROCm path on without ROCm too.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done and write nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
