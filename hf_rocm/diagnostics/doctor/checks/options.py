"""hf_rocm's own variables: are they understood, and do they hold something back?"""

from __future__ import annotations

from collections.abc import Iterator

from hf_rocm import options as settings
from hf_rocm.diagnostics.doctor.facts import Facts
from hf_rocm.diagnostics.doctor.report import Finding, ok, problem, warning
from hf_rocm.errors import OptionError

# with this value they take something away that is on by default
HOLD_BACK = {
    "HF_ROCM_PROBE": ("0", "kernels are used without having been checked on this machine"),
    "FORCE_EAGER_ATTENTION": ("1", "attention runs in plain PyTorch, slowly"),
    "USE_AITER_ATTENTION": ("0", "attention runs without aiter"),
    "USE_AITER_GEMM": ("0", "linear layers run without aiter"),
    "USE_AITER_MOE": ("0", "mixtures of experts run without aiter"),
    "USE_OPTIMIZED_OPS": ("0", "activations, norms and rotations run without aiter"),
}


def options(facts: Facts) -> Iterator[Finding]:
    try:
        parsed = settings.parse(facts.environment)
    except OptionError as error:
        allowed = "; ".join(f"{label}: {value}" for label, value in error.facts.items())
        yield problem(
            "options",
            error.message,
            means=f"loading a model raises this ({allowed})" if allowed else "loading a model raises this",
            fix=error.hint or f"unset {error.message.split('=')[0]}",
        )
        return
    held = {name: why for name, (value, why) in HOLD_BACK.items() if facts.set(name) == value}
    if parsed.tiers and facts.set("HF_ROCM_TIER"):
        held["HF_ROCM_TIER"] = f"named tiers must work or raise ({facts.set('HF_ROCM_TIER')})"
    if held:
        yield warning(
            "options",
            ", ".join(f"{name}={facts.set(name)}" for name in held),
            means="; ".join(held.values()),
            fix=f"unset {' '.join(held)}, unless that is what you want",
        )
    else:
        given = [f"{each.name}={facts.set(each.name)}" for each in settings.VARIABLES if facts.set(each.name)]
        yield ok("options", ", ".join(given) or "hf_rocm's own variables are unset: everything is automatic")
