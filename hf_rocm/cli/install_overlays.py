"""`hf-rocm install-overlays`: append the overlays to transformers' modeling files."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_rocm.cli.execution import report
from hf_rocm.cli.parameters import DryRun, Json, Models, TransformersPath


def install_overlays(
    models: Models = None,
    transformers_path: TransformersPath = None,
    skip_changed: Annotated[
        bool,
        typer.Option("--skip-changed", help="Leave out models that a newer transformers changed; take the others."),
    ] = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Give transformers' modeling files a ROCm path; without ROCm they stay stock.

    Without MODEL, every overlay that the installed release has. All files are checked before the first is written.
    """
    from hf_rocm.overlay.commands import install

    plan, notices = install(
        models or (), transformers_path=transformers_path, dry_run=dry_run, skip_changed=skip_changed
    )
    report(plan, notices, dry_run=dry_run, as_json=json)
