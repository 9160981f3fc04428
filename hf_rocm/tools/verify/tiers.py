"""Check every tier: run all operations that it can serve, and list the others with reasons."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from hf_rocm import options
from hf_rocm.errors import TierUnavailable
from hf_rocm.ops.registry import operations
from hf_rocm.tools.verify.cases import Case
from hf_rocm.tools.verify.check import NOT_RUN, Check
from hf_rocm.tools.verify.examine import Examined, examine
from hf_rocm.tools.verify.model_under_test import Subject
from hf_rocm.tools.verify.reference import run

TIERS = ("aiter", "triton", "torch", "eager")
TITLE = "with every operation that this tier can serve"

Within = Callable[[int], AbstractContextManager[Any]]


def each_tier(subject: Subject, known: Examined) -> list[Check]:
    """Return one check per tier. known: a case that ran without a selected tier; its operations are checked."""
    all_operations = operations()
    families = sorted({all_operations[route.operation].family for route in known.free.routes} & set(options.OPERATIONS))
    return [_check_tier(subject, known, tier, families) for tier in TIERS]


def _check_tier(subject: Subject, known: Examined, tier: str, families: list[str]) -> Check:
    name, case = f"{tier} tier", known.case
    # operation → the first call in which the tier serves it
    served: dict[str, int] = {}
    refused: dict[str, str] = {}
    for family in families:
        for first in range(min(2, len(case.steps))):
            reason = _refuses(subject, case, {family: first}, tier)
            if reason is None:
                served[family] = first
                break
            refused.setdefault(family, reason)
    unserved = {family: reason for family, reason in refused.items() if family not in served}
    grouped = _grouped(unserved)
    reasons = "; ".join(f"{names}: {reason}" for names, reason in grouped.items())
    if not served:
        # If there is a single reason, omit the list of operations.
        shared = next(iter(grouped.values())) if len(grouped) == 1 else reasons
        return Check(name, TITLE, NOT_RUN, note=shared)
    words = [f"{family} on a filled cache" if first else family for family, first in served.items()]
    note = ", ".join(words) + (f"; not {reasons}" if reasons else "")
    check = examine(
        subject, case, note=note, within=_selecting(served, tier), recorded=known.reference, keep=True
    ).check
    return replace(check, name=name, title=TITLE)


def _refuses(subject: Subject, case: Case, served: dict[str, int], tier: str) -> str | None:
    """Return the reason why the tier can't serve these operations in the first two calls of the case, or None."""
    try:
        run(subject, replace(case, steps=case.steps[:2]), subject.dtype, within=_selecting(served, tier))
    except TierUnavailable as error:
        return next((reason for label, reason in error.facts.items() if label != "call"), error.message)
    return None


def _selecting(served: dict[str, int], tier: str) -> Within:
    return lambda number: options.override(tiers={name: tier for name, first in served.items() if number >= first})


def _grouped(refused: dict[str, str]) -> dict[str, str]:
    """Merge operations with the same reason."""
    by_reason: dict[str, list[str]] = {}
    for family, reason in refused.items():
        by_reason.setdefault(reason, []).append(family)
    return {", ".join(families): reason for reason, families in by_reason.items()}
