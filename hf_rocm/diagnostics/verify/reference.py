"""Runs of one case, and the reference that ours are held to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_rocm.diagnostics.verify.cases import Case
from hf_rocm.diagnostics.verify.points import Recorder
from hf_rocm.diagnostics.verify.subject import Subject
from hf_rocm.errors import VerifyError
from hf_rocm.ops.registry import Route

Points = dict[str, dict[str, Tensor]]  # layer → point → [N, D]


@dataclass(eq=False)
class Run:
    """What one run of a case gave, call by call. finals: [N, V]; inputs: what each layer was called with."""

    finals: list[Tensor] = field(default_factory=list)
    points: list[Points] = field(default_factory=list)
    inputs: list[dict[str, Tensor]] = field(default_factory=list)
    ran: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    routes: list[Route] = field(default_factory=list)


class StockFailed(VerifyError):
    """Stock can't run a case, so there is no reference for it."""


@dataclass(eq=False)
class Reference:
    """Of one case. eager: stock in the model's dtype. wide: stock in the wider one. local: the wider one where every
    layer gets what eager's got, so that no error travels from layer to layer.
    """

    eager: Run
    wide: Run
    local: Run


def reference_of(subject: Subject, case: Case, inside: set[str]) -> Reference:
    """inside: the layers whose inner points are wanted. Raises `StockFailed`."""
    try:
        with subject.stock():
            eager = run(subject, case, subject.dtype, inside=inside, rotary=True)
        with subject.reference():
            wide = run(subject, case, subject.wide)
            local = run(subject, case, subject.wide, inside=inside, forced=eager.inputs, rotary=True)
    except Exception as error:  # whatever it is, what stock can't do is nothing to hold hf_rocm to
        raise StockFailed(f"stock itself can't: {' '.join(str(error).split())[:160]}") from error
    return Reference(eager, wide, local)


def run(
    subject: Subject,
    case: Case,
    dtype: torch.dtype,
    *,
    inside: set[str] | None = None,
    forced: list[dict[str, Tensor]] | None = None,
    rotary: bool = False,
    within: Callable[[int], AbstractContextManager[Any]] = nullcontext,
) -> Run:
    """Run a case with the model as it is. forced: what each layer is called with, call by call. within: a context for
    each call.
    """
    found = Run()
    recorder = Recorder(subject.blocks, subject.outside, inside=inside or set(), rotary=rotary)

    def begin(number: int) -> None:
        if number < len(case.steps):
            keeps = (case.steps[number].keep, case.final_keep(number))
            recorder.begin(keeps, forced[number] if forced else None)

    def seen(number: int, output: Any) -> None:
        keep = case.final_keep(number)
        final = subject.final(output)
        found.finals.append(final[keep.to(final.device)].cpu())
        found.points.append(recorder.points)
        found.inputs.append(recorder.inputs)
        begin(number + 1)

    begin(0)
    with recorder.recording() as routes:
        case.run(subject, dtype, seen, within)
    found.ran, found.routes = recorder.ran, routes
    return found
