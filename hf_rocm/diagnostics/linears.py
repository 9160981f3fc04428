"""What explain says of a model's linear layers beside their fusion: shuffled weights and routes."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from hf_rocm.weights.preshuffle import in_force
from hf_rocm.weights.routed import BACKEND, is_routed


def linears(model: nn.Module, report: dict[str, Any]) -> tuple[str, ...]:
    """Sentences about the model as it is now; report: what was done to it when it was prepared."""
    lines = []
    asked: dict[str, Any] = report.get("preshuffle") or {}
    now = in_force(model)
    if asked.get("shuffled"):
        rows = asked["threshold"]
        if rows:
            words = f"shuffled: {now} as copies, {asked['bytes']} bytes of {asked['budget']} granted"
            lines.append(f"{words}, for products of {rows} rows and up")
        else:
            lines.append(f"shuffled in place: {now}")
        lost = len(asked["shuffled"]) - now
        if lost > 0:
            lines.append(
                f"no longer shuffled × {lost}: the weights were read, written or moved from outside; "
                "hf_rocm.prepare(model) shuffles them again"
            )
    reasons = Counter((asked.get("skipped") or {}).values())
    lines += [f"not shuffled × {count}: {reason}" for reason, count in reasons.items()]
    routes = Counter(module.__dict__[BACKEND] for module in model.modules() if BACKEND in module.__dict__)
    lines += [f"routed × {count}: {backend}" for backend, count in routes.items()]
    unserved = sum(BACKEND in module.__dict__ and not is_routed(module) for module in model.modules())
    if unserved:
        lines.append(f"routed, but with another forward since × {unserved}")
    return tuple(lines)
