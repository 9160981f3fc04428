"""Count the calls of replacement forwards, to prove that hf_rocm served the modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_rocm import ops
from hf_rocm.layers.fallback_reasons import noted
from hf_rocm.overlay import bind


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of replacement forwards, per stock class."""
    counts: Counter[str] = Counter()
    kept = []

    def counting(name: str, replacement: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return replacement(self, *args, **kwargs)

        return forward

    for binding in list(bind.bindings()):
        kept.append((binding, binding.replacement))
        binding.replacement = counting(binding.cls.__name__, binding.replacement)
    try:
        yield counts
    finally:
        for binding, replacement in kept:
            binding.replacement = replacement


def assert_served(model: Any, classes: tuple[str, ...], routes: list[Any], hits: Counter[str]) -> None:
    """Check that all modules of these classes were served, with at least one attention operation per served call."""
    for name in classes:
        modules = [module for module in model.modules() if type(module).__name__ == name]
        assert modules, f"the model has no {name}"
        assert hits[name] >= len(modules), f"{name}: {hits[name]} served calls, {len(modules)} modules"
        for module in modules:
            assert bind.mode_of(module) == bind.ON
            assert noted(module) is None, f"{name} stayed stock: {noted(module)}"
    attended = [route for route in routes if route.operation in ("attention", "decode_attention", "varlen_attention")]
    expected = sum(hits[name] for name in classes)
    assert len(attended) >= expected, f"{len(attended)} attention operations in {expected} calls"


def assert_experts_served(model: Any, name: str | None, routes: list[Any], hits: Counter[str]) -> None:
    """Check that the experts of every layer were served, with one operation per call.

    name: the class with the replaced forward, or None.
    """
    modules = [module for module in model.modules() if type(module).__name__ == name]
    assert modules or name is None, f"the model has no {name}"
    for module in modules:
        assert noted(module) is None, f"{name} stayed stock: {noted(module)}"
    if modules:
        assert hits[name] >= len(modules)
        assert len([route for route in routes if route.operation == "experts"]) == hits[name]


def served_groups(model: Any) -> dict[str, list[str]]:
    """The fused groups of a prepared model, by module."""
    report: dict[str, Any] = model.__dict__.get("_hf_rocm_report", {})
    groups: dict[str, list[str]] = report.get("fused", {})
    return groups


recording = ops.recording
