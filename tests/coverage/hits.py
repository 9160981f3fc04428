"""Which forwards of ours ran: the proof of the route."""

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
    """Counts, by stock class, how often a replacement forward was called."""
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
    """Ours ran in every attention module of these classes, stayed with none, and never expanded keys or values."""
    for name in classes:
        modules = [module for module in model.modules() if type(module).__name__ == name]
        assert modules, f"the model has no {name}"
        assert hits[name] >= len(modules), f"{name}: {hits[name]} calls of ours, {len(modules)} modules"
        for module in modules:
            assert bind.mode_of(module) == bind.ON
            assert noted(module) is None, f"{name} stayed stock: {noted(module)}"
    attended = [each for each in routes if each.operation in ("attention", "decode_attention", "varlen_attention")]
    expected = sum(hits[name] for name in classes)
    assert len(attended) >= expected, f"{len(attended)} attention operations in {expected} calls"


def assert_experts_served(model: Any, name: str | None, routes: list[Any], hits: Counter[str]) -> None:
    """The experts of every mixture ran in one operation. name: of the class whose forward is ours."""
    modules = [module for module in model.modules() if type(module).__name__ == name]
    assert modules or name is None, f"the model has no {name}"
    for module in modules:
        assert noted(module) is None, f"{name} stayed stock: {noted(module)}"
    if modules:
        assert hits[name] >= len(modules)
        assert len([each for each in routes if each.operation == "experts"]) == hits[name]


def served_groups(model: Any) -> dict[str, list[str]]:
    """The fused groups of a prepared model, by module."""
    report: dict[str, Any] = model.__dict__.get("_hf_rocm_report", {})
    groups: dict[str, list[str]] = report.get("fused", {})
    return groups


recording = ops.recording
