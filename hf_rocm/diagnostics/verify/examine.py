"""One case from beginning to end: the reference, ours, what is off, in pieces that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from hf_rocm.diagnostics.verify.cases import Case
from hf_rocm.diagnostics.verify.judge import bounds_of, faults_of, judge, layer_errors
from hf_rocm.diagnostics.verify.points import OUTPUT
from hf_rocm.diagnostics.verify.reference import Reference, Run, reference_of, run
from hf_rocm.diagnostics.verify.report import Check, Fault, LayerError
from hf_rocm.diagnostics.verify.subject import Subject

ROOM = 4 << 30  # bytes of host memory for what is compared inside layers at once


@dataclass(frozen=True, eq=False)
class Examined:
    """The verdict, and the runs that later checks build on, without what was compared inside layers."""

    case: Case
    check: Check
    layers: tuple[LayerError, ...]
    reference: Reference
    free: Run


def examine(
    subject: Subject,
    case: Case,
    *,
    note: str = "",
    within: Callable[[int], AbstractContextManager[Any]] = nullcontext,
    recorded: Reference | None = None,
    keep: bool = False,
) -> Examined:
    """Hold ours to the reference. within: a context for each of our calls. recorded: a reference that is known, from a
    golden file perhaps, which has the outputs of layers alone. keep: leave what is inside layers in the reference, for
    the next time, if there was room for all of it at once.
    """
    faults: dict[str, Fault] = {}
    layers: tuple[LayerError, ...] = ()
    reference, free = recorded, None
    groups = list(_groups(subject, case)) if recorded is None else [_looked_into(recorded)]
    for inside in groups:
        found = recorded or reference_of(subject, case, inside)
        free = free or run(subject, case, subject.dtype, within=within)  # after stock has shown that it can be run
        local = run(subject, case, subject.dtype, inside=inside, forced=found.eager.inputs, within=within)
        bounds = bounds_of(subject, found)
        off = faults_of(subject, found, local, bounds)
        # a layer that was looked into is named by an operation, in the piece that looked into it
        faults |= {layer: fault for layer, fault in off.items() if layer in inside or layer not in faults}
        layers = layers or layer_errors(subject, found, free, local, bounds)
        reference = found if keep and len(groups) == 1 else _outputs_alone(found)
    assert reference is not None and free is not None
    order = [*subject.outside, *subject.blocks]
    order = [name for points in reference.local.points[:1] for name in points] or order
    faults = {layer: faults[layer] for layer in order if layer in faults}
    return Examined(case, judge(subject, case, reference, free, faults, note), layers, reference, free)


def _groups(subject: Subject, case: Case) -> Iterator[set[str]]:
    """Layers that are looked into at once: as many as there is room for."""
    config = subject.text_config
    rows = sum(int(step.keep.sum()) for step in case.steps)
    hidden = int(getattr(config, "hidden_size", 1024))
    sizes = getattr(config, "intermediate_size", None) or 4 * hidden
    wide = max(sizes) if isinstance(sizes, (list, tuple)) else int(sizes)  # some have one for each layer
    each = rows * (12 * hidden + 4 * wide) * 8  # about: three runs, one of them in four bytes
    size, names = max(1, ROOM // max(1, each)), list(subject.blocks)
    for start in range(0, max(1, len(names)), size):
        yield set(names[start : start + size])


def _looked_into(reference: Reference) -> set[str]:
    return {layer for call in reference.local.points for layer, points in call.items() if len(points) > 1}


def _outputs_alone(reference: Reference) -> Reference:
    for kept in (reference.eager, reference.local):
        kept.points = [
            {layer: {OUTPUT: points[OUTPUT]} for layer, points in call.items() if OUTPUT in points}
            for call in kept.points
        ]
    return reference
