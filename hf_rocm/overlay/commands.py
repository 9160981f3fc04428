"""The commands as functions: locate transformers, examine its files, plan and write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hf_rocm.errors import HfRocmError, OverlayError
from hf_rocm.overlay import catalog as catalogs
from hf_rocm.overlay.audit import Audit, Progress, audit
from hf_rocm.overlay.catalog import Catalog
from hf_rocm.overlay.install import execute
from hf_rocm.overlay.locate import Installation, check_writable, locate
from hf_rocm.overlay.lock import exclusive
from hf_rocm.overlay.plan import Plan, plan_install, plan_uninstall
from hf_rocm.overlay.scan import left_out, no_overlay, survey
from hf_rocm.overlay.state import FileState, LeftOut


@contextmanager
def system_errors() -> Iterator[None]:
    """Turn an `OSError` from reading into an `OverlayError`; errors from writing have their own messages."""
    try:
        yield
    except OSError as error:
        if isinstance(error, HfRocmError):
            raise
        raise OverlayError(
            "transformers or hf-rocm could not be read; nothing was written",
            facts={"file": error.filename or "(unknown)", "found": error.strerror or error},
            hint="fix the permissions or the file system, then run the command again",
        ) from error


@system_errors()
def install(
    models: Iterable[str] = (),
    *,
    transformers_path: Path | str | None = None,
    dry_run: bool = False,
    skip_changed: bool = False,
    catalog: Catalog | None = None,
) -> tuple[Plan, list[str]]:
    """Append the overlays of these models, or all overlays for this release if no model is named.

    skip_changed: skip models whose file was changed upstream or edited, instead of refusing. A file whose block
    was edited is refused in any case.

    Returns the plan and notices for the user. The plan is not executed in a dry run or if it has refusals.
    Raises `OverlayError` if no plan can be made or writing fails, and `Interrupted` if a signal arrives during writing.
    """
    catalog = catalog or catalogs.load()
    installation = locate(transformers_path)
    check_writable(installation)
    if not catalog.for_release(installation.version):
        raise no_overlay(installation, catalog)
    with _lock(installation, dry_run) as notices:
        plan = plan_install(installation, survey(installation, catalog, models))
        if not models:
            # a leftover block of a model without an overlay for this release is not installed again
            plan = plan_install(installation, [state for state in plan.states if state.overlay is not None])
            plan = replace(plan, left_out=left_out(installation, catalog))
        if skip_changed:
            plan = _without_changed(plan)
        if not dry_run and not plan.refusals:
            execute(plan)
    return plan, notices


def _without_changed(plan: Plan) -> Plan:
    reduced = plan_install(plan.installation, [state for state in plan.states if not state.skippable])
    changed = {state.model: _why_skipped(state) for state in plan.states if state.skippable}
    return replace(reduced, left_out=LeftOut(plan.left_out.absent, {**plan.left_out.stock, **changed}))


def _why_skipped(state: FileState) -> str:
    return f"{'upstream changed it' if state.outgrown else 'its file was edited'}: {state.detail}"


@system_errors()
def uninstall(
    models: Iterable[str] = (),
    *,
    transformers_path: Path | str | None = None,
    dry_run: bool = False,
    catalog: Catalog | None = None,
) -> tuple[Plan, list[str]]:
    """Remove the overlays of these models, or every block if none is named. Returns and raises as `install` does."""
    # Uninstalling works even if hf-rocm's files were changed.
    catalog = catalog or catalogs.load(checked=False)
    installation = locate(transformers_path)
    check_writable(installation)
    with _lock(installation, dry_run) as notices:
        plan = plan_uninstall(installation, survey(installation, catalog, models))
        if not dry_run and not plan.refusals:
            execute(plan)
    return plan, notices


class Status(NamedTuple):
    """The transformers installation, the states of its files, and the models that were left out."""

    installation: Installation
    states: list[FileState]
    left_out: LeftOut


@system_errors()
def status(
    models: Iterable[str] = (), *, transformers_path: Path | str | None = None, catalog: Catalog | None = None
) -> Status:
    """Examine the files of these models, or all files with an overlay or a block if none is named. Writes nothing."""
    catalog = catalog or catalogs.load()
    installation = locate(transformers_path)
    states = survey(installation, catalog, models)
    return Status(installation, states, LeftOut() if models else left_out(installation, catalog))


@system_errors()
def record(
    *,
    transformers_path: Path | str | None = None,
    progress: Progress | None = None,
    catalog: Catalog | None = None,
) -> Audit:
    """Compare the whole transformers package with its package manager's record. Writes nothing."""
    return audit(locate(transformers_path), catalog or catalogs.load(), progress=progress)


def _lock(installation: Installation, dry_run: bool) -> AbstractContextManager[list[str]]:
    return nullcontext([]) if dry_run else exclusive(installation.root)
