"""What installing and uninstalling print and return."""

from __future__ import annotations

import typer

from hf_rocm.cli.output import print_error, print_groups, print_json, print_left_out, print_notice, print_transformers
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
    outgrown = sum(state.outgrown for state in plan.states) if plan.command == "install-overlays" else 0
    if outgrown and outgrown == len(plan.refusals) and outgrown < len(plan.states):
        rest = len(plan.states) - outgrown
        print_notice(f"nothing was written; `hf-rocm install-overlays --skip-changed` takes the other {rest}")
    if plan.refusals:
        raise typer.Exit(1)
    if not as_json:
        _print_actions(plan, dry_run=dry_run)


def _print_actions(plan: Plan, *, dry_run: bool) -> None:
    print_transformers(plan.installation)
    words = _PLANNED if dry_run else _DONE
    kept = "installed already" if plan.command == "install-overlays" else "not installed"
    print_groups(
        ("result", "overlays"),
        (((words.get(each.verb, kept), each.overlay.split("/")[0] or "-"), each.model) for each in plan.actions),
    )
    print_left_out(plan.left_out, plan.installation.version)
    if not plan.writes:
        print("nothing to do")
