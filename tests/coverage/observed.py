"""Record what hf_rocm does in every model, for the support matrix.

    python -m tests.coverage.observed docs/support              write <release>.json for the installed transformers
    python -m tests.coverage.observed docs/support mistral …    only the rows of these overlays

Marks are not declared: "recorded" is "yes" if `prepare` decided to record the model, and every other mark is "yes" if
its operation ran inside a replaced forward.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import nn

import hf_rocm
from hf_rocm import ops
from hf_rocm.layers.fallback_reasons import noted
from hf_rocm.loading.prepare import report_of
from hf_rocm.overlay import bind, catalog
from hf_rocm.weights import fuse
from hf_rocm.weights.prefused import fused_in_checkpoint
from tests.coverage import inputs
from tests.coverage.case import Case

FEATURES = (
    "attention", "fused QKV", "fused gate/up", "activation", "norm", "add+norm", "rope", "MoE", "recorded",
)  # fmt: skip
YES, FUSED_IN_CHECKPOINT, NONE = "yes", "fused in the checkpoint", "the model has none"
ATTENTION = {"attend_into_cache", "attention", "decode_attention", "varlen_attention"}
GATES = re.compile(r"gate_proj|gate_up_proj|wi_0|w1|Wi|gate_linear|fc_gate")
Row = dict[str, Any]


def observed(case: Case) -> dict[str, Row]:
    """Run the case and, for text models that support it, a step with a filled cache. Observe the overlays that ran.

    Returns one row per overlay, keyed by the overlay's model: the overlay's id, the classes whose replaced forward ran,
    with the operations inside it, and a mark for each feature.
    """
    model = hf_rocm.prepare(case.build(), force=True)
    with torch.inference_mode(), ops.recording() as routes, _watched(routes) as routes_by_class:
        result = model(**inputs.arguments(case, model))
        if case.kind == "text" and "cache" not in case.unsupported_by_stock:
            past = model(input_ids=inputs.tokens(2, 9), use_cache=True).past_key_values
            model(input_ids=inputs.tokens(2, 1, seed=1), past_key_values=past, use_cache=True)
        assert result is not None
    rows = {}
    for name in sorted({cls.__module__.split(".")[-2] for cls in routes_by_class}):
        classes = {cls: routes for cls, routes in routes_by_class.items() if cls.__module__.split(".")[-2] == name}
        rows[name] = _row(name, model, classes)
    return rows


def merged(rows: Iterable[Row]) -> Row:
    """Merge the rows of several configurations of a model. Every feature gets the best of its marks."""
    first, *rest = rows
    for row in rest:
        first["classes"] = {
            name: sorted({*first["classes"].get(name, ()), *row["classes"].get(name, ())})
            for name in sorted({*first["classes"], *row["classes"]})
        }
        for feature, mark in row["support"].items():
            best = min((first["support"][feature], mark), key=_rank)
            first["support"][feature] = best
    return first


def _rank(mark: str) -> int:
    if mark in (YES, FUSED_IN_CHECKPOINT):
        return (YES, FUSED_IN_CHECKPOINT).index(mark)
    return 2 if mark.startswith(YES) else 4 if mark == NONE else 3


@contextmanager
def _watched(routes: list[Any]) -> Iterator[dict[type, list[Any]]]:
    """Yield, by stock class, the operations that ran inside its replaced forward."""
    routes_by_class: dict[type, list[Any]] = {}
    kept = [(binding, binding.replacement) for binding in bind.bindings()]

    def watching(cls: type, replacement: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = len(routes)
            result = replacement(self, *args, **kwargs)
            routes_by_class.setdefault(cls, []).extend(routes[before:])
            return result

        return forward

    for binding, replacement in kept:
        binding.replacement = watching(binding.cls, replacement)
    try:
        yield routes_by_class
    finally:
        for binding, replacement in kept:
            binding.replacement = replacement


def _row(name: str, model: nn.Module, classes: dict[type, list[Any]]) -> Row:
    overlay = catalog.load().find(name, transformers.__version__)
    assert overlay is not None
    module = sys.modules[overlay.module]
    modules = [module for module in model.modules() if type(module).__module__ == overlay.module]
    ran = {cls: {route.operation for route in routes} for cls, routes in classes.items()}
    return {
        "overlay": overlay.id,
        "classes": {cls.__name__: sorted(operations) for cls, operations in sorted(ran.items(), key=str)},
        "support": _support(model, module, modules, classes, ran),
    }


def _support(
    model: nn.Module,
    module: ModuleType,
    modules: list[nn.Module],
    classes: dict[type, list[Any]],
    ran: dict[type, set[str]],
) -> dict[str, str]:
    attending = [cls for cls, operations in ran.items() if operations & ATTENTION]
    others = [cls for cls in ran if cls not in attending and not re.search("Attention|DeltaNet", cls.__name__)]
    operations_run = set().union(*ran.values()) if ran else set()
    names = {type(module).__name__ for module in modules}
    text = Path(str(module.__file__)).read_text(encoding="utf-8").split("# >>> hf-rocm")[0]
    has_norm, has_experts = (
        any("RMSNorm" in name for name in names),
        any(re.search("Experts|SparseMoe|Moe?E$|MoE", name) for name in names),
    )
    gated = any(GATES.fullmatch(child) for module in modules for child, _ in module.named_children())
    attention_modules = [module for module in modules if type(module) in attending]
    marks = {
        "attention": _attention(modules, attention_modules, attending),
        "fused QKV": _fused(attention_modules, classes),
        "fused gate/up": _fused([module for module in modules if type(module) in others], classes),
        "activation": _ran({"act_and_mul"}, operations_run, gated, "no operation of hf_rocm computes it"),
        "norm": _ran({"rms_norm"}, operations_run, has_norm, "hf_rocm does not serve its kind of norm"),
        "add+norm": _ran(
            {"add_rms_norm", "add_layer_norm"},
            operations_run,
            has_norm or "rms_norm" in operations_run,
            "the layer is not replaced, so the sum and the norm are two calls",
        ),
        "rope": _ran({"rope"}, operations_run, "rotary" in text, "`ops.rope` does not serve its kind of rotation"),
        "MoE": _ran(
            {"experts", "shuffled_experts"}, operations_run, has_experts, "hf_rocm does not serve its kind of experts"
        ),
        "recorded": _recorded(model),
    }
    if marks["fused gate/up"] == NONE and gated:
        marks["fused gate/up"] = "stock: hf_rocm does not fuse its gated MLP"
    if not attending:
        marks["fused QKV"] = NONE if marks["attention"] == NONE else "stock: its attention stays stock"
    return {feature: marks[feature] for feature in FEATURES}


def _attention(modules: list[nn.Module], attention_modules: list[nn.Module], attending: list[type]) -> str:
    kinds = {type(module) for module in modules if "Attention" in type(module).__name__}
    candidates = [*attention_modules, *(module for module in modules if type(module) in kinds)]
    stayed = sorted({reason for module in candidates if (reason := noted(module)) is not None})
    if stayed:
        return f"stock: {stayed[0]}"
    # a module that contains another attention module, or has no linear layers, does not count as unserved attention
    leaves = {
        type(module) for module in modules
        if type(module) in kinds and any(isinstance(child, nn.Linear) for _, child in module.named_children())
        and not any(type(inner) in kinds for inner in list(module.modules())[1:])
    }  # fmt: skip
    left = sorted(cls.__name__ for cls in leaves - set(attending))
    if not attending:
        return f"stock: {', '.join(left)} is not replaced" if left else NONE
    return f"{YES}, except in {', '.join(left)}" if left else YES


def _recorded(model: nn.Module) -> str:
    """The mark for recording the model's decode steps or, if the model does not generate, its forwards."""
    report = report_of(model)
    decisions = [report["graphs"]["off"]] if hasattr(model, "generate") else list(report["forwards"].values())
    if not decisions:
        return "stock: it keeps a cache and does not generate"
    return YES if None in decisions else f"stock: {decisions[0]}"


def _fused(modules: list[nn.Module], classes: dict[type, list[Any]]) -> str:
    """The mark for fusing: whether, in each of these modules, one GEMM computed all layers that the overlay fuses."""
    groups, reasons = [], []
    for module in modules:
        binding = bind.binding_of(module)
        names = binding.fuses if binding is not None else ()
        if len(names) > 1 and all(module._modules.get(name) is not None for name in names):
            rows = sum(module._modules[name].weight.shape[0] for name in names)  # type: ignore[union-attr,misc]
            shapes = {route.shapes[1][0] for route in classes[type(module)] if route.operation == "linear"}
            groups.append(rows in shapes)
            with torch.no_grad():
                reason = fuse.why_not(module, names) or "the layers ran one by one"
            reasons += [reason] if rows not in shapes else []
    if groups and all(groups):
        return YES
    if groups:
        return f"stock: {reasons[0]}" if len(reasons) == len(groups) else f"{YES}, except in some modules: {reasons[0]}"
    return FUSED_IN_CHECKPOINT if any(fused_in_checkpoint(module) for module in modules) else NONE


def _ran(operations: set[str], operations_run: set[str], has_feature: bool, reason: str) -> str:
    if operations & operations_run:
        return YES
    return f"stock: {reason}" if has_feature else NONE


def record(models: Iterable[str] = (), recorded: dict[str, Row] | None = None) -> dict[str, Row]:
    """Observe every overlay of the installed release in all cases that use it.

    models: the overlays to observe, by default all. recorded: the recorded rows, which are kept for other overlays.
    """
    from tests.coverage.cases import CASES

    recorded = recorded or {}
    chosen = {case for name in models for case in recorded.get(name, {}).get("cases", ())}
    rows: dict[str, list[Row]] = {}
    for case in CASES:
        if case.applies and (not models or case.overlay in models or case.id in chosen):
            for name, row in observed(case).items():
                if not models or name in models:
                    rows.setdefault(name, []).append({**row, "cases": [case.id]})
    observed_rows = {name: _joined(result) for name, result in rows.items()}
    kept = {name: row for name, row in recorded.items() if models and name not in models}
    return dict(sorted({**kept, **observed_rows}.items()))


def _joined(rows: list[Row]) -> Row:
    cases = sorted({case for row in rows for case in row.pop("cases")})
    return {**merged(rows), "cases": cases}


def main(folder: str, *models: str) -> None:
    torch.set_num_threads(1)
    target = Path(folder) / f"{transformers.__version__}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    recorded = json.loads(target.read_text(encoding="utf-8")) if models and target.is_file() else {}
    target.write_text(json.dumps(record(models, recorded), indent=1) + "\n", encoding="utf-8")
    print(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
