"""Examine one case: run the reference and hf_rocm, and compare them in groups of layers that fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from hf_rocm.tools.verify.cases import Case
from hf_rocm.tools.verify.check import Check, Fault, LayerError
from hf_rocm.tools.verify.judge import bounds_of, faults_of, judge, layer_errors
from hf_rocm.tools.verify.model_under_test import Subject
from hf_rocm.tools.verify.points import OUTPUT
from hf_rocm.tools.verify.reference import Reference, Run, reference_of, run

# Bytes of host memory for the intermediate activations that are compared at the same time.
ROOM = 4 << 30


@dataclass(frozen=True, eq=False)
class Examined:
    """The result of a case, and the runs that later checks use.

    The runs contain no intermediate activations, unless `examine` keeps those of the reference.
    """

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
    """Compare hf_rocm with the reference in one case.

    within: a function that returns a context manager for a call in hf_rocm's runs. recorded: a known reference, for
    example from a golden file, which contains no intermediate activations. keep: keep the reference's intermediate
    activations if they fit in memory.
    """
    faults: dict[str, Fault] = {}
    layers: tuple[LayerError, ...] = ()
    reference, free = recorded, None
    groups = list(_groups(subject, case)) if recorded is None else [_inspected(recorded)]
    for inside in groups:
        exact = recorded or reference_of(subject, case, inside)
        # this runs after the reference, which raises an error if stock can't run the case
        free = free or run(subject, case, subject.dtype, within=within)
        local = run(subject, case, subject.dtype, inside=inside, forced=exact.eager.inputs, within=within)
        bounds = bounds_of(subject, exact)
        group_faults = faults_of(subject, exact, local, bounds)
        # the operation at fault is known only from the run that recorded the layer's intermediate activations
        faults |= {layer: fault for layer, fault in group_faults.items() if layer in inside or layer not in faults}
        layers = layers or layer_errors(subject, exact, free, local, bounds)
        reference = exact if keep and len(groups) == 1 else _only_outputs(exact)
    assert reference is not None and free is not None
    order = [*subject.outside, *subject.blocks]
    order = [name for points in reference.local.points[:1] for name in points] or order
    faults = {layer: faults[layer] for layer in order if layer in faults}
    return Examined(case, judge(subject, case, reference, free, faults, note), layers, reference, free)


def _groups(subject: Subject, case: Case) -> Iterator[set[str]]:
    """Yield groups of layers whose intermediate activations are recorded together, as large as memory allows."""
    config = subject.text_config
    rows = sum(int(step.keep.sum()) for step in case.steps)
    hidden = int(getattr(config, "hidden_size", 1024))
    sizes = getattr(config, "intermediate_size", None) or 4 * hidden
    # Some configs have one size per layer.
    wide = max(sizes) if isinstance(sizes, (list, tuple)) else int(sizes)
    # an estimate per layer of a 16-bit model: three runs record every value, two in 2 bytes and one in 4 bytes
    nbytes = rows * (12 * hidden + 4 * wide) * 8
    size, names = max(1, ROOM // max(1, nbytes)), list(subject.blocks)
    for start in range(0, max(1, len(names)), size):
        yield set(names[start : start + size])


def _inspected(reference: Reference) -> set[str]:
    return {layer for call in reference.local.points for layer, points in call.items() if len(points) > 1}


def _only_outputs(reference: Reference) -> Reference:
    for run_ in (reference.eager, reference.local):
        run_.points = [
            {layer: {OUTPUT: points[OUTPUT]} for layer, points in call.items() if OUTPUT in points}
            for call in run_.points
        ]
    return reference
