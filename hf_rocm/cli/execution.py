"""The output and the exit codes of `install-overlays` and `uninstall-overlays`."""

from __future__ import annotations

import typer

from hf_rocm import options
from hf_rocm.cli.output import (
    print_error,
    print_groups,
    print_json,
    print_left_out,
    print_next,
    print_notice,
    print_transformers,
    print_wrapped,
)
from hf_rocm.errors import OptionError
from hf_rocm.overlay.facts import torch_facts
from hf_rocm.overlay.plan import Plan, Verb
from hf_rocm.overlay.state import the_others

_DONE = {Verb.INSTALL: "installed", Verb.UPDATE: "updated", Verb.REMOVE: "removed"}
_PLANNED = {Verb.INSTALL: "would install", Verb.UPDATE: "would update", Verb.REMOVE: "would remove"}
# The largest number of models that are listed without --all.
_NAMED = 12


def report(plan: Plan, notices: list[str], *, dry_run: bool, as_json: bool, everything: bool = False) -> None:
    """Print what was done (with dry_run: what would be done), or why nothing was done.

    Raises `typer.Exit` with 1 if the plan was refused.
    """
    for notice in notices:
        print_notice(notice)
    if as_json:
        print_json({**plan.to_dict(), "dry_run": dry_run, "written": not dry_run and not plan.refusals})
    errors = plan.refusals if everything else plan.errors
    for number, error in enumerate(errors):
        if number:
            typer.echo(err=True)
        print_error(error)
    skippable = sum(state.skippable for state in plan.states) if plan.command == "install-overlays" else 0
    if len(errors) == len(plan.refusals) == skippable > 0 and skippable < len(plan.states):
        rest = len(plan.states) - skippable
        print_notice(f"nothing was written; `hf-rocm install-overlays --skip-changed` installs {the_others(rest)}")
    if plan.refusals:
        raise typer.Exit(1)
    if not as_json:
        _print_actions(plan, dry_run=dry_run, everything=everything)


def _print_actions(plan: Plan, *, dry_run: bool, everything: bool) -> None:
    installing = plan.command == "install-overlays"
    words = _PLANNED if dry_run else _DONE
    kept = "already installed" if installing else "not installed"
    print_transformers(plan.installation)
    if everything:
        results = (
            ((words.get(action.verb, kept), action.overlay.split("/")[0] or "-"), action.model)
            for action in plan.actions
        )
        print_groups(("result", "overlays"), results)
        print()
    print_left_out(plan.left_out, plan.installation.version)
    models = {verb: [action.model for action in plan.actions if action.verb is verb] for verb in Verb}
    done = [f"{word} {_counted(models[verb], everything)}" for verb, word in words.items() if models[verb]]
    done = done or ["nothing to do"]
    if models[Verb.KEEP] and not everything and (installing or plan.writes):
        count = len(models[Verb.KEEP])
        done[-1] += f"; {count} {'was' if count == 1 else 'were'} {kept}"
    for sentence in done:
        print_wrapped(sentence)
    if plan.writes and installing and not dry_run:
        if not torch_facts().hip and not _forced():
            print_wrapped("inert here: this torch is not a ROCm build, so these models stay stock")
        print_next("hf-rocm status; hf-rocm explain MODEL")


def _forced() -> bool:
    try:
        return options.force_requested()
    except OptionError:
        # If the value is invalid, models with installed overlays stay stock.
        return False


def _counted(models: list[str], everything: bool) -> str:
    count = f"{len(models)} overlay{'s' * (len(models) != 1)}"
    if len(models) <= _NAMED:
        return f"{count}: {', '.join(models)}"
    return count if everything else f"{count} (--all lists them)"
