"""Ours beside the reference: which layer is off by itself, at which operation, and what that does to the result."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import torch
from torch import Tensor

from hf_rocm.diagnostics.verify.cases import Case
from hf_rocm.diagnostics.verify.measure import Allowed, Difference, allowed, difference, predictions
from hf_rocm.diagnostics.verify.points import OUTPUT, label, same_point
from hf_rocm.diagnostics.verify.reference import Reference, Run
from hf_rocm.diagnostics.verify.report import FAILED, PASSED, Check, Fault, LayerError
from hf_rocm.diagnostics.verify.subject import Subject

# What configs call the number of experts, and models the layer that chooses them.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ROUTERS = ("gate", "router")

LEAST = 8  # numbers of a position: the relative error of fewer is chance

Bounds = dict[tuple[str, str], Allowed]  # by layer and point


def judge(
    subject: Subject, case: Case, reference: Reference, free: Run, faults: dict[str, Fault], note: str = ""
) -> Check:
    """The verdict on one case. free: ours from end to end; faults: the layers that are off by themselves."""
    final = _final(subject, reference, free)
    first = next(iter(faults.values()), None)
    if first is not None:
        first = replace(first, others=tuple(faults)[1:])
    elif final.status == FAILED:
        first = Fault("", "", final.error or math.nan, final.allowed or 0.0)
    status = FAILED if first is not None else PASSED
    return replace(final, name=case.name, title=case.title, status=status, note=note, fault=first)


def bounds_of(subject: Subject, reference: Reference) -> Bounds:
    """By layer and point: from the eager run's error there in any call, or usual for this point in other layers.

    A single layer may be right by luck in the eager run, where no other order of the same sums would be.
    """
    errors: dict[tuple[str, str], list[Difference]] = {}
    for eager, wide in zip(reference.eager.points, reference.local.points, strict=True):
        for layer, points in eager.items():
            rerouted = _rerouted(subject, points, wide.get(layer, {}))
            for name, value in points.items():
                exact = wide.get(layer, {}).get(name)
                if exact is not None and exact.shape == value.shape and value.shape[1] >= LEAST:
                    errors.setdefault((layer, name), []).append(_compared(value, exact, rerouted))
    own = {place: allowed(found, subject.dtype) for place, found in errors.items()}
    usual: dict[str, list[Allowed]] = {}
    for (_, name), bound in own.items():
        usual.setdefault(name, []).append(bound)
    return {
        (layer, name): Allowed(
            max(bound.worst, statistics.median(each.worst for each in usual[name])),
            max(bound.typical, statistics.median(each.typical for each in usual[name])),
        )
        for (layer, name), bound in own.items()
    }


def faults_of(subject: Subject, reference: Reference, ours: Run, bounds: Bounds) -> dict[str, Fault]:
    """By layer, in order: the first point, in stock's order, that is off by more than allowed.

    ours: a run where every layer got what stock's got.
    """
    order = {layer: place for place, layer in enumerate(dict.fromkeys(key for key, _ in bounds))}
    found: dict[str, Fault] = {}
    for exact, points in zip(reference.local.points, ours.points, strict=True):
        for layer, names in exact.items():
            rerouted = _rerouted(subject, points.get(layer, {}), names)
            for name, expected in names.items():
                bound, actual = bounds.get((layer, name)), same_point(points.get(layer, {}), name)
                if layer in found or bound is None or actual is None or actual.shape != expected.shape:
                    continue
                off = _compared(actual, expected, rerouted)
                if bound.exceeded(off):
                    by_worst = off.worst > bound.worst or not off.finite
                    sizes = (off.worst, bound.worst) if by_worst else (off.typical, bound.typical)
                    found[layer] = Fault(layer, label(layer, name, ours.ran), *sizes)
    return dict(sorted(found.items(), key=lambda each: order[each[0]]))


def _rerouted(subject: Subject, ours: dict[str, Tensor], exact: dict[str, Tensor]) -> Tensor | None:
    """[N] rows of a mixture whose experts were chosen otherwise: two nearly equal scores, no operation's error."""
    config = subject.text_config
    experts = next((n for name in _EXPERTS if isinstance(n := getattr(config, name, None), int)), 0)
    top = int(getattr(config, "num_experts_per_tok", 0) or 0)
    for name, scores in exact.items() if experts and top else ():
        mine = ours.get(name)
        if name.split(".")[-1] in _ROUTERS and scores.shape[-1] == experts and mine is not None:
            chosen = [each.double().topk(top, dim=-1).indices.sort(dim=-1).values for each in (mine, scores)]
            return (chosen[0] != chosen[1]).any(-1)
    return None


def _compared(actual: Tensor, expected: Tensor, rerouted: Tensor | None) -> Difference:
    if rerouted is None or len(rerouted) != len(expected):
        return difference(actual, expected)
    return difference(actual[~rerouted], expected[~rerouted])


def _final(subject: Subject, reference: Reference, ours: Run) -> Check:
    """The end result of the free runs."""
    exact, eager, found = finals(reference.wide, reference.eager, ours)
    stock = difference(eager, exact)
    off, bound = end_to_end(subject, difference(found, exact), stock)
    said, plain = predictions(found, exact, eager), predictions(eager, exact, eager)
    numbers = {
        "max": off.largest, "mean": off.mean, "typical": off.typical, "kl": said.kl, "same_top1": said.same,
        "within_5e-2": said.within_guides, "stock_error": stock.worst, "stock_max": stock.largest,
        "stock_mean": stock.mean, "stock_typical": stock.typical, "stock_kl": plain.kl, "stock_same_top1": plain.same,
    }  # fmt: skip
    status = FAILED if bound.exceeded(off) else PASSED
    return Check("final", "", status, off.worst, bound.worst, numbers)


def finals(*runs: Run) -> list[Tensor]:
    """[N, V] of each run: what all of its calls gave."""
    return [torch.cat([each.flatten(1) for each in run.finals]) for run in runs]


def end_to_end(subject: Subject, off: Difference, stock: Difference) -> tuple[Difference, Allowed]:
    """An end result's difference as it is judged, and its bound.

    In a mixture a token that goes to another expert is far off, and so is what reads it: there the median decides.
    """
    if not is_mixture(subject):
        return off, allowed([stock], subject.dtype)
    return replace(off, worst=off.median), Allowed(2 * stock.median + torch.finfo(subject.dtype).eps, math.inf)


def is_mixture(subject: Subject) -> bool:
    """Whether some of the model's layers send their tokens to experts."""
    return any(isinstance(getattr(subject.text_config, name, None), int) for name in _EXPERTS)


def layer_errors(
    subject: Subject, reference: Reference, free: Run, local: Run, bounds: Bounds
) -> tuple[LayerError, ...]:
    """The errors of each layer's output, by itself and end to end."""

    def worst(run: Run, exact: Run, layer: str) -> float:
        pairs = [
            (mine[layer][OUTPUT], theirs[layer][OUTPUT])
            for mine, theirs in zip(run.points, exact.points, strict=True)
            if OUTPUT in mine.get(layer, {}) and OUTPUT in theirs.get(layer, {})
        ]
        return max((difference(*pair).worst for pair in pairs), default=math.nan)

    return tuple(
        LayerError(
            layer,
            travelled=worst(free, reference.wide, layer),
            stock_travelled=worst(reference.eager, reference.wide, layer),
            own=worst(local, reference.local, layer),
            stock_own=worst(reference.eager, reference.local, layer),
            allowed=bounds[layer, OUTPUT].worst,
        )
        for layer in subject.blocks
        if (layer, OUTPUT) in bounds
    )
