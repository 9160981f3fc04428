"""The entry point of doctor: examine a machine."""

from __future__ import annotations

from hf_rocm.tools.doctor import checks
from hf_rocm.tools.doctor.collect import Progress, collect
from hf_rocm.tools.doctor.facts import Facts
from hf_rocm.tools.doctor.machine import Machine, ThisMachine
from hf_rocm.tools.doctor.report import Report


def doctor(model: str | None = None, *, machine: Machine | None = None, progress: Progress | None = None) -> Report:
    """Examine this machine (or `machine`), and check whether `model`, a folder or a name on the Hub, fits on it.

    This process imports neither torch nor transformers nor aiter; child processes import torch, aiter and bitsandbytes,
    and may crash. Raises nothing.
    """
    return report(collect(machine or ThisMachine(), model=model, progress=progress))


def report(facts: Facts) -> Report:
    """Return the report on these facts."""
    findings = checks.findings(facts)
    return Report(
        tuple(finding for finding in findings if finding.shown),
        summary(facts),
        others=tuple(finding for finding in findings if not finding.shown),
    )


def summary(facts: Facts) -> dict[str, str]:
    """Return a short description of the machine: label → value."""
    from hf_rocm import __version__

    parts = {
        "hf-rocm": __version__,
        "system": f"{facts.system.name} {facts.system.release}",
        "Python": facts.system.python,
        "GPU": ", ".join(facts.gpus) or "no AMD GPU",
        "ROCm": facts.rocm.version or "not installed",
        "torch": facts.torch.version or "not installed",
        "transformers": facts.transformers.version or "not installed",
        "aiter": facts.aiter.package.sentence,
    }
    return {label: value.strip() for label, value in parts.items()}
