"""`hf-rocm install-overlays`: append the overlays to transformers' modeling files."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_rocm.cli.execution import report
from hf_rocm.cli.parameters import DryRun, Everything, Json, Models, TransformersPath


def install_overlays(
    models: Models = None,
    transformers_path: TransformersPath = None,
    skip_changed: Annotated[
        bool,
        typer.Option(
            "--skip-changed", help="Skip models whose files were changed, upstream or locally, and install the others."
        ),
    ] = False,
    dry_run: DryRun = False,
    everything: Everything = False,
    json: Json = False,
) -> None:
    """Add a ROCm path to transformers' modeling files. Without ROCm, models stay stock.

    Without MODEL, all overlays for the installed release are installed. All files are checked before the first one is
    written.
    """
    from hf_rocm.overlay.commands import install

    plan, notices = install(
        models or (), transformers_path=transformers_path, dry_run=dry_run, skip_changed=skip_changed
    )
    report(plan, notices, dry_run=dry_run, as_json=json, everything=everything)
