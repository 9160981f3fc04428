"""What the commands do, as functions: locate, look, plan, write."""

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
from hf_rocm.overlay.state import FileState, LeftOut
from hf_rocm.overlay.survey import left_out, no_overlay, survey


@contextmanager
def system_errors() -> Iterator[None]:
    """Turn what the system refused while we were looking into an `OverlayError`; writing has words of its own."""
    try:
        yield
    except OSError as error:
        if isinstance(error, HfRocmError):
            raise
        raise OverlayError(
            "the system refused to read transformers or hf-rocm; nothing was written",
            facts={"file": error.filename or "(not said)", "found": error.strerror or error},
            hint="fix the permissions or the file system, then run it again",
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
    """Append the overlays of these models (none named: all that this release has).

    skip_changed: leave out the models of which upstream changed a definition, in place of refusing; an edited file is
    refused all the same.

    Returns the plan, and notices for the user. A plan with refusals was not executed, nor was a dry run's.
    Raises `OverlayError` where no plan can be made, or where writing it failed.
    """
    catalog = catalog or catalogs.load()
    installation = locate(transformers_path)
    check_writable(installation)
    if not catalog.for_release(installation.version):
        raise no_overlay(installation, catalog)
    with _lock(installation, dry_run) as notices:
        plan = plan_install(installation, survey(installation, catalog, models))
        if not models:
            # a block that is left of a model which this release no longer serves is nothing to install
            plan = plan_install(installation, [state for state in plan.states if state.overlay is not None])
            plan = replace(plan, left_out=left_out(installation, catalog))
        if skip_changed:
            plan = _without_changed(plan)
        if not dry_run and not plan.refusals:
            execute(plan)
    return plan, notices


def _without_changed(plan: Plan) -> Plan:
    kept = plan_install(plan.installation, [state for state in plan.states if not state.outgrown])
    changed = {state.model: f"upstream changed it: {state.detail}" for state in plan.states if state.outgrown}
    return replace(kept, left_out=LeftOut(plan.left_out.absent, {**plan.left_out.stock, **changed}))


@system_errors()
def uninstall(
    models: Iterable[str] = (),
    *,
    transformers_path: Path | str | None = None,
    dry_run: bool = False,
    catalog: Catalog | None = None,
) -> tuple[Plan, list[str]]:
    """Take the overlays of these models off again (none named: every block that is there). As `install`."""
    catalog = catalog or catalogs.load(checked=False)  # whatever was done to hf-rocm, the way back is open
    installation = locate(transformers_path)
    check_writable(installation)
    with _lock(installation, dry_run) as notices:
        plan = plan_uninstall(installation, survey(installation, catalog, models))
        if not dry_run and not plan.refusals:
            execute(plan)
    return plan, notices


class Status(NamedTuple):
    """Where transformers is, the state of each file, and the models without one."""

    installation: Installation
    states: list[FileState]
    left_out: LeftOut


@system_errors()
def status(
    models: Iterable[str] = (), *, transformers_path: Path | str | None = None, catalog: Catalog | None = None
) -> Status:
    """Look at the files of these models (none named: all that this release has). Writes nothing."""
    catalog = catalog or catalogs.load()
    installation = locate(transformers_path)
    states = survey(installation, catalog, models)
    return Status(installation, states, LeftOut() if models else left_out(installation, catalog))


@system_errors()
def record(*, transformers_path: Path | str | None = None, progress: Progress | None = None) -> Audit:
    """The whole transformers package against what its package manager recorded. Writes nothing."""
    return audit(locate(transformers_path), progress=progress)


def _lock(installation: Installation, dry_run: bool) -> AbstractContextManager[list[str]]:
    return nullcontext([]) if dry_run else exclusive(installation.root)
