"""Compare hf_rocm with the reference, to find wrong layers and operations, and to check the end result."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import torch
from torch import Tensor

from hf_rocm.tolerance import allowed_error
from hf_rocm.tools.verify.cases import Case
from hf_rocm.tools.verify.check import FAILED, PASSED, Check, Fault, LayerError
from hf_rocm.tools.verify.measure import Allowed, Difference, allowed, difference, predictions
from hf_rocm.tools.verify.model_under_test import Subject
from hf_rocm.tools.verify.points import OUTPUT, label, same_point
from hf_rocm.tools.verify.reference import Reference, Run

# Config fields for the number of experts, and the names of router modules.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ROUTERS = ("gate", "router")

# The minimum number of values per position; with fewer, the relative error depends on chance.
LEAST = 8

# (layer, point) → bounds
Bounds = dict[tuple[str, str], Allowed]


def judge(
    subject: Subject, case: Case, reference: Reference, free: Run, faults: dict[str, Fault], note: str = ""
) -> Check:
    """Return the check of one case. free: hf_rocm's run end to end. faults: as returned by `faults_of`."""
    final = _final(subject, reference, free)
    first = next(iter(faults.values()), None)
    if first is not None:
        first = replace(first, others=tuple(faults)[1:])
    elif final.status == FAILED:
        first = Fault("", "", final.error or math.nan, final.allowed or 0.0)
    status = FAILED if first is not None else PASSED
    return replace(final, name=case.name, title=case.title, status=status, note=note, fault=first)


def bounds_of(subject: Subject, reference: Reference) -> Bounds:
    """Return the bounds by layer and point. Every bound is at least the median of the point's bounds over all layers.

    A bound is derived from the eager run's error. In a single layer this error may be small by chance, and would be
    larger with a different order of summation.
    """
    errors: dict[tuple[str, str], list[Difference]] = {}
    for eager, wide in zip(reference.eager.points, reference.local.points, strict=True):
        for layer, points in eager.items():
            rerouted = _rerouted(subject, points, wide.get(layer, {}))
            for name, value in points.items():
                exact = wide.get(layer, {}).get(name)
                if exact is not None and exact.shape == value.shape and value.shape[1] >= LEAST:
                    errors.setdefault((layer, name), []).append(_compared(value, exact, rerouted))
    own = {point: allowed(own_errors, subject.dtype) for point, own_errors in errors.items()}
    usual: dict[str, list[Allowed]] = {}
    for (_, name), bound in own.items():
        usual.setdefault(name, []).append(bound)
    return {
        (layer, name): Allowed(
            max(bound.worst, statistics.median(other.worst for other in usual[name])),
            max(bound.typical, statistics.median(other.typical for other in usual[name])),
        )
        for (layer, name), bound in own.items()
    }


def faults_of(subject: Subject, reference: Reference, run: Run, bounds: Bounds) -> dict[str, Fault]:
    """Map every wrong layer to the `Fault` of its first point whose error exceeds the bound.

    Layers and points are in stock's order. run: a run in which every layer had stock's input.
    """
    order = {layer: index for index, layer in enumerate(dict.fromkeys(key for key, _ in bounds))}
    faults: dict[str, Fault] = {}
    for exact, points in zip(reference.local.points, run.points, strict=True):
        for layer, names in exact.items():
            rerouted = _rerouted(subject, points.get(layer, {}), names)
            for name, expected in names.items():
                bound, actual = bounds.get((layer, name)), same_point(points.get(layer, {}), name)
                if layer in faults or bound is None or actual is None or actual.shape != expected.shape:
                    continue
                measured = _compared(actual, expected, rerouted)
                if bound.exceeded(measured):
                    by_worst = measured.worst > bound.worst or not measured.finite
                    sizes = (measured.worst, bound.worst) if by_worst else (measured.typical, bound.typical)
                    faults[layer] = Fault(layer, label(layer, name, run.ran), *sizes)
    return dict(sorted(faults.items(), key=lambda item: order[item[0]]))


def _rerouted(subject: Subject, actual: dict[str, Tensor], exact: dict[str, Tensor]) -> Tensor | None:
    """Return [N] bool: the rows that were routed to different experts, as happens if two scores are almost equal.

    None if the model has no routed experts, or if no router was recorded.
    """
    config = subject.text_config
    experts = next((n for name in _EXPERTS if isinstance(n := getattr(config, name, None), int)), 0)
    top = int(getattr(config, "num_experts_per_tok", 0) or 0)
    for name, scores in exact.items() if experts and top else ():
        routed = actual.get(name)
        if name.split(".")[-1] in _ROUTERS and scores.shape[-1] == experts and routed is not None:
            chosen = [logits.double().topk(top, dim=-1).indices.sort(dim=-1).values for logits in (routed, scores)]
            return (chosen[0] != chosen[1]).any(-1)
    return None


def _compared(actual: Tensor, expected: Tensor, rerouted: Tensor | None) -> Difference:
    if rerouted is None or len(rerouted) != len(expected):
        return difference(actual, expected)
    return difference(actual[~rerouted], expected[~rerouted])


def _final(subject: Subject, reference: Reference, run: Run) -> Check:
    """Check the end result. run: hf_rocm's run end to end."""
    exact, eager, actual = finals(reference.wide, reference.eager, run)
    stock = difference(eager, exact)
    measured, bound = end_to_end(subject, difference(actual, exact), stock)
    logits, plain = predictions(actual, exact, eager), predictions(eager, exact, eager)
    numbers = {
        "max": measured.largest, "mean": measured.mean, "typical": measured.typical, "kl": logits.kl,
        "same_top1": logits.same, "within_5e-2": logits.within_guides, "stock_error": stock.worst,
        "stock_max": stock.largest, "stock_mean": stock.mean, "stock_typical": stock.typical, "stock_kl": plain.kl,
        "stock_same_top1": plain.same,
    }  # fmt: skip
    status = FAILED if bound.exceeded(measured) else PASSED
    return Check("final", "", status, measured.worst, bound.worst, numbers)


def finals(*runs: Run) -> list[Tensor]:
    """Return, for every run, the outputs of all its calls as [N, V]."""
    return [torch.cat([final.flatten(1) for final in run.finals]) for run in runs]


def end_to_end(subject: Subject, measured: Difference, stock: Difference) -> tuple[Difference, Allowed]:
    """Return the difference of an end result, adjusted for routed experts, and its bound.

    With routed experts, a token that is routed to another expert has a large error, and so do the tokens that attend to
    it. For such models, the median over the positions is compared.
    """
    if not is_moe(subject):
        return measured, allowed([stock], subject.dtype)
    return replace(measured, worst=measured.median), Allowed(allowed_error(stock.median, subject.dtype), math.inf)


def is_moe(subject: Subject) -> bool:
    """Return whether some of the model's layers route tokens to experts."""
    return any(isinstance(getattr(subject.text_config, name, None), int) for name in _EXPERTS)


def layer_errors(
    subject: Subject, reference: Reference, free: Run, local: Run, bounds: Bounds
) -> tuple[LayerError, ...]:
    """Return the errors of every layer's output, on stock's input and end to end."""

    def worst(run: Run, exact: Run, layer: str) -> float:
        pairs = [
            (actual[layer][OUTPUT], expected[layer][OUTPUT])
            for actual, expected in zip(run.points, exact.points, strict=True)
            if OUTPUT in actual.get(layer, {}) and OUTPUT in expected.get(layer, {})
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
