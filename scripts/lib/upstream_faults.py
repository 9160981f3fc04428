"""A pytest plugin that injects faults into hf_rocm's operations, to show which tests detect them.

The plugin is loaded with `-p upstream_faults`, in transformers' tests together with `upstream_plugin`. Every
implementation of an operation is wrapped, so the tier and the route do not change. Environment variables:
UPSTREAM_FAULT is the name of a fault. UPSTREAM_SPREAD scales the standard deviation of the weights that transformers
initialises. UPSTREAM_FAULT_LOG is a file with one JSON line per phase of a test: its outcome, and the number of changed
calls so far.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

Call = Callable[..., Any]

# The number of changed calls so far.
reached = 0


def scale(call: Call) -> Call:
    """Scores are 1.5 times as large."""
    return _with_terms(call, lambda terms: {"scale": terms["scale"] * 1.5})


def window(call: Call) -> Call:
    """A sliding window, given as a number or in the mask, is ignored: a query also attends to older keys."""

    def changes(terms: dict[str, Any]) -> dict[str, Any]:
        changed: dict[str, Any] = {} if terms["window"] is None else {"window": None}
        given = terms.get("mask")
        if given is not None:
            hidden = given != 0 if given.dtype.is_floating_point else ~given.bool()
            # hidden keys to which two or more earlier queries attend; one may be a padding query that attends to itself
            older = (~hidden).int().cumsum(dim=-2).ge(2) & hidden
            if older.any():
                changed["mask"] = given.masked_fill(older, 0.0 if given.dtype.is_floating_point else True)
        return changed

    return _with_terms(call, changes)


def mask(call: Call) -> Call:
    """The mask is ignored, except for its causal part."""
    import torch

    def changes(terms: dict[str, Any]) -> dict[str, Any]:
        given = terms.get("mask")
        if given is None:
            return {}
        s_q, s_k = given.shape[-2:]
        causal = given.new_ones(s_q, s_k, dtype=torch.bool).tril(s_k - s_q)
        seen = given == 0 if given.dtype.is_floating_point else given.bool()
        return {} if bool((seen == causal).all()) else {"mask": None, "causal": True}

    return _with_terms(call, changes)


def rope(call: Call) -> Call:
    """Queries and keys are not rotated."""
    import torch

    def changed(query: Any, key: Any, cos: Any, sin: Any, *more: Any, **terms: Any) -> Any:
        _count()
        return call(query, key, torch.ones_like(cos), torch.zeros_like(sin), *more, **terms)

    return changed


def epsilon(call: Call) -> Call:
    """A norm's eps is 1000 times as large."""

    def changed(*arguments: Any) -> Any:
        _count()
        *tensors, eps, one_plus = arguments
        return call(*tensors, eps * 1000, one_plus)

    return changed


def one_plus(call: Call) -> Call:
    """A norm multiplies by the weight instead of one plus the weight, or vice versa."""

    def changed(*arguments: Any) -> Any:
        _count()
        *tensors, eps, plus = arguments
        return call(*tensors, eps, not plus)

    return changed


FAULTS: dict[str, tuple[tuple[str, ...], Callable[[Call], Call]]] = {
    "attention scale × 1.5": (("attention", "decode_attention"), scale),
    "rope dropped": (("rope",), rope),
    "window dropped": (("attention", "decode_attention"), window),
    "mask dropped": (("attention",), mask),
    "norm's eps × 1000": (("rms_norm", "add_rms_norm"), epsilon),
    "norm's one_plus": (("rms_norm", "add_rms_norm"), one_plus),
}


def pytest_collection_finish(session: object) -> None:
    if spread := float(os.environ.get("UPSTREAM_SPREAD", "1")):
        _spread(spread)
    if name := os.environ.get("UPSTREAM_FAULT"):
        _plant(name)


def pytest_runtest_logreport(report: Any) -> None:
    if log := os.environ.get("UPSTREAM_FAULT_LOG"):
        entry = {"test": report.nodeid, "outcome": report.outcome, "when": report.when, "reached": reached}
        with Path(log).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _plant(name: str) -> None:
    from hf_rocm.ops import registry

    operations, wrap = FAULTS[name]
    for operation_name in operations:
        operation = registry.operations()[operation_name]
        operation.implementations[:] = [
            replace(implementation, call=wrap(implementation.call)) for implementation in operation.implementations
        ]
        operation.forget()


def _spread(factor: float) -> None:
    """Initialise weights with a larger spread, so that attention is not nearly uniform and the inputs of norms are not
    nearly constant."""
    if factor == 1:
        return
    import transformers.initialization as init

    normal = init.normal_

    def spread(tensor: Any, mean: float = 0.0, std: float = 1.0, **kwargs: Any) -> Any:
        return normal(tensor, mean=mean, std=std * factor, **kwargs)

    init.normal_ = spread


def _with_terms(call: Call, changes: Callable[[dict[str, Any]], dict[str, Any]]) -> Call:
    def changed(*tensors: Any, **terms: Any) -> Any:
        changed_terms = changes(terms)
        if changed_terms:
            _count()
        return call(*tensors, **{**terms, **changed_terms})

    return changed


def _count() -> None:
    global reached
    reached += 1
