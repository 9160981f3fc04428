"""The part of `explain` about linear layers: shuffled weights, routes, and patch embeddings that run as GEMMs.

Fusion is reported per class.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from hf_rocm.tools.explanation import HEAD
from hf_rocm.weights import patch_embeddings
from hf_rocm.weights.instance_forward import is_attached
from hf_rocm.weights.linear_hook import BACKEND, FEW_ROWS
from hf_rocm.weights.preshuffle import in_force


def linears(model: nn.Module, report: dict[str, Any]) -> tuple[str, ...]:
    """Return sentences about the current state of the model. report: the report of `prepare`."""
    lines = []
    preshuffle: dict[str, Any] = report.get("preshuffle") or {}
    shuffled = in_force(model)
    if preshuffle.get("shuffled"):
        rows = preshuffle["threshold"]
        if rows:
            words = f"shuffled: {shuffled} as copies, {preshuffle['bytes']} bytes of a budget of {preshuffle['budget']}"
            lines.append(f"{words}, for GEMMs of at least {rows} rows")
        else:
            lines.append(f"shuffled in place: {shuffled}")
        lost = len(preshuffle["shuffled"]) - shuffled
        if lost > 0:
            lines.append(
                f"no longer shuffled × {lost}: other code has read, written or moved the weights; "
                "hf_rocm.prepare(model) shuffles them again"
            )
    reasons = Counter((preshuffle.get("skipped") or {}).values())
    lines += [f"not shuffled × {count}: {reason}" for reason, count in reasons.items()]
    routes = Counter(module.__dict__[BACKEND] for module in model.modules() if BACKEND in module.__dict__)
    if routes.pop(FEW_ROWS, 0):
        lines.append(HEAD)
    elif (report.get("head") or "").startswith("the head"):
        lines.append(f"the output head stays stock: {report['head'].removeprefix('the head ')}")
    lines += [f"routed × {count}: {backend}" for backend, count in routes.items()]
    unserved = sum(BACKEND in module.__dict__ and not is_attached(module) for module in model.modules())
    if unserved:
        lines.append(f"routed, but another forward was set later × {unserved}")
    embeddings: dict[str, Any] = report.get("patch_embeddings") or {}
    lines += [f"as a GEMM instead of a convolution: {name}" for name in patch_embeddings.in_force(model)]
    lines += [f"a convolution stays stock, {name}: {reason}" for name, reason in embeddings.get("stock", {}).items()]
    return tuple(lines)
