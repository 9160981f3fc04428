"""What installing and uninstalling print and return."""

from __future__ import annotations

import typer

from hf_rocm.cli.output import print_error, print_json, print_notice, print_table, print_transformers, shorten
from hf_rocm.overlay.plan import Plan, Verb

_DONE = {Verb.INSTALL: "installed", Verb.UPDATE: "updated", Verb.REMOVE: "removed"}
_PLANNED = {Verb.INSTALL: "would install", Verb.UPDATE: "would update", Verb.REMOVE: "would remove"}


def report(plan: Plan, notices: list[str], *, dry_run: bool, as_json: bool) -> None:
    """Print what was done, or why nothing was; raises `typer.Exit` with 1 if the plan was refused."""
    for notice in notices:
        print_notice(notice)
    if as_json:
        print_json({**plan.to_dict(), "dry_run": dry_run, "written": not dry_run and not plan.refusals})
    for number, error in enumerate(plan.refusals):
        if number:
            typer.echo(err=True)
        print_error(error)
    if plan.refusals:
        raise typer.Exit(1)
    if not as_json:
        _print_actions(plan, dry_run=dry_run)


def _print_actions(plan: Plan, *, dry_run: bool) -> None:
    print_transformers(plan.installation)
    words = _PLANNED if dry_run else _DONE
    kept = "installed already" if plan.command == "install-overlays" else "not installed"
    rows = [
        (
            action.model,
            words.get(action.verb, kept),
            action.overlay or "-",
            shorten(action.file, plan.installation.root),
        )
        for action in plan.actions
    ]
    if rows:
        print_table(("model", "result", "overlay", "file"), rows)
    if not plan.writes:
        print("nothing to do")
