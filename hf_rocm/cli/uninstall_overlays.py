"""`hf-rocm uninstall-overlays`: remove the overlays and restore transformers' files byte for byte."""

from __future__ import annotations

from hf_rocm.cli.execution import report
from hf_rocm.cli.parameters import DryRun, Everything, Json, Models, TransformersPath


def uninstall_overlays(
    models: Models = None,
    transformers_path: TransformersPath = None,
    dry_run: DryRun = False,
    everything: Everything = False,
    json: Json = False,
) -> None:
    """Restore transformers' modeling files, byte for byte.

    Without MODEL, all installed overlays are removed. A file that was edited after the installation is refused
    and not changed.
    """
    from hf_rocm.overlay.commands import uninstall

    plan, notices = uninstall(models or (), transformers_path=transformers_path, dry_run=dry_run)
    report(plan, notices, dry_run=dry_run, as_json=json, everything=everything)
