"""The runs of one case, and the reference with which they are compared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_rocm.errors import VerifyError
from hf_rocm.ops.registry import Route
from hf_rocm.tools.verify.cases import Case
from hf_rocm.tools.verify.model_under_test import Subject
from hf_rocm.tools.verify.points import Recorder

# layer → point → [N, D]
Points = dict[str, dict[str, Tensor]]


@dataclass(eq=False)
class Run:
    """The results of one run of a case.

    finals, points, inputs: one item per call; finals: [N, V]; inputs: layer → its input. ran: the operations of hf_rocm
    that ran, by layer and path. routes: the calls to operations, with their tiers.
    """

    finals: list[Tensor] = field(default_factory=list)
    points: list[Points] = field(default_factory=list)
    inputs: list[dict[str, Tensor]] = field(default_factory=list)
    ran: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    routes: list[Route] = field(default_factory=list)


class StockFailed(VerifyError):
    """Stock can't run a case, so the case has no reference."""


@dataclass(eq=False)
class Reference:
    """The reference runs of one case.

    eager: stock in the model's dtype. wide: stock in the wider dtype. local: stock in the wider dtype, where every
    layer gets its input from the eager run, so that errors don't propagate from layer to layer.
    """

    eager: Run
    wide: Run
    local: Run


def reference_of(subject: Subject, case: Case, inside: set[str]) -> Reference:
    """Run the reference. inside: the layers whose inner points are recorded. Raises `StockFailed` if stock fails."""
    try:
        with subject.stock():
            eager = run(subject, case, subject.dtype, inside=inside, rotary=True)
        with subject.reference():
            wide = run(subject, case, subject.wide)
            local = run(subject, case, subject.wide, inside=inside, forced=eager.inputs, rotary=True)
    except Exception as error:
        # A case that stock can't run has no reference.
        raise StockFailed(f"stock itself fails: {' '.join(str(error).split())[:160]}") from error
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
    """Run a case in the model's current state.

    inside: the layers whose inner points are recorded. forced: the inputs of layers, by call. rotary: as in
    `Recorder`. within: a function that returns a context manager for a call.
    """
    result = Run()
    recorder = Recorder(subject.blocks, subject.outside, inside=inside or set(), rotary=rotary)

    def begin(number: int) -> None:
        if number < len(case.steps):
            keeps = (case.steps[number].keep, case.final_keep(number))
            recorder.begin(keeps, forced[number] if forced else None)

    def record(number: int, output: Any) -> None:
        keep = case.final_keep(number)
        final = subject.final(output)
        result.finals.append(final[keep.to(final.device)].cpu())
        result.points.append(recorder.points)
        result.inputs.append(recorder.inputs)
        begin(number + 1)

    begin(0)
    with recorder.recording() as routes:
        case.run(subject, dtype, record, within)
    result.ran, result.routes = recorder.ran, routes
    return result
