"""hf_rocm's environment variables: whether they are valid, and whether they disable something."""

from __future__ import annotations

from collections.abc import Iterator

from hf_rocm import options as settings
from hf_rocm.tools.doctor.facts import Facts
from hf_rocm.tools.doctor.report import Finding, ok, problem, warning
from hf_rocm.tools.redact import SECRET
from hf_rocm.variables import unknown

# Values that disable something that is enabled by default.
RESTRICTING = {
    "HF_ROCM_PROBE": ("0", "kernels are used without a check on this machine"),
    "FORCE_EAGER_ATTENTION": ("1", "attention runs in plain PyTorch, slowly"),
    "USE_AITER_ATTENTION": ("0", "attention runs without aiter"),
    "USE_AITER_GEMM": ("0", "linear layers run without aiter"),
    "USE_AITER_MOE": ("0", "MoE layers run without aiter"),
    "USE_OPTIMIZED_OPS": ("0", "activations, norms and RoPE run without aiter"),
}


def options(facts: Facts) -> Iterator[Finding]:
    error = settings.invalid(facts.environment)
    if error is not None:
        allowed = "; ".join(f"{label}: {value}" for label, value in error.facts.items())
        yield problem(
            "options",
            error.message,
            means=f"loading a model raises this error ({allowed})" if allowed else "loading a model raises this error",
            fix=error.hint or f"unset {error.message.split('=')[0]}",
        )
        return
    parsed = settings.parse(facts.environment)
    # Secrets are omitted from the report.
    names = [name for name in facts.environment if not SECRET.search(name)]
    unknown_names = unknown(names, (variable.name for variable in settings.VARIABLES))
    if unknown_names:
        yield warning(
            "options",
            f"{', '.join(unknown_names)} {'is not an option' if len(unknown_names) == 1 else 'are not options'} of "
            "hf_rocm",
            means="misspelt or from another release: no effect",
            fix="; ".join(
                f"unset {name}" + (f", or rename it to {near}" if near else "") for name, near in unknown_names.items()
            ),
        )
    restricted = {name: reason for name, (value, reason) in RESTRICTING.items() if facts.set(name) == value}
    if parsed.tiers and facts.set("HF_ROCM_TIER"):
        restricted["HF_ROCM_TIER"] = f"calls that a named tier can't serve raise an error ({facts.set('HF_ROCM_TIER')})"
    if restricted:
        yield warning(
            "options",
            ", ".join(f"{name}={facts.set(name)}" for name in restricted),
            means="; ".join(restricted.values()),
            fix=f"unset {' '.join(restricted)}, unless that is what you want",
        )
        return
    assigned = [f"{option.name}={facts.set(option.name)}" for option in settings.VARIABLES if facts.set(option.name)]
    if assigned or not unknown_names:
        yield ok("options", ", ".join(assigned) or "hf_rocm's own variables are unset: everything is automatic")
