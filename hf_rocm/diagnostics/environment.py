"""The block that `hf-rocm env` prints: what an issue needs to know about a machine, and nothing private."""

from __future__ import annotations

import getpass
import platform
from collections.abc import Mapping

from hf_rocm.diagnostics import redact
from hf_rocm.diagnostics.doctor.examine import report, summary
from hf_rocm.diagnostics.doctor.facts import Facts
from hf_rocm.diagnostics.doctor.report import Level

PACKAGES = (
    "accelerate",
    "amd-aiter",
    "bitsandbytes",
    "flash-attn",
    "huggingface-hub",
    "kernels",
    "liger-kernel",
    "numpy",
    "peft",
    "pytorch-triton-rocm",
    "safetensors",
    "torchvision",
    "triton",
    "triton-rocm",
    "unsloth",
    "vllm",
)


def block(facts: Facts) -> str:
    """The report as text, cleaned."""
    parts = [_aligned(_machine(facts))]
    told = redact.variables(facts.environment)
    if told:
        parts.append("\n".join(f"{name}={value}" for name, value in told.items()))
    findings = [each for each in report(facts).findings if each.level is not Level.OK]
    parts.append("\n".join(f"{each.level.value}: {each.check}: {each.what}" for each in findings) or "doctor: all ok")
    return redact.clean(
        "\n\n".join(parts), home=facts.environment.get("HOME", ""), user=_user(facts.environment), host=platform.node()
    )


def _machine(facts: Facts) -> dict[str, str]:
    cards = dict.fromkeys(f"{each.card} ({each.name}, {each.units} CUs)" for each in facts.rocm.agents)
    opened = dict.fromkeys(f"{each['name']} ({each['arch']})" for each in facts.devices)
    found = {**summary(facts)}
    found["GPU"] = ", ".join(cards or opened) or found["GPU"]
    found["driver"] = facts.driver.version or ("amdgpu" if facts.driver.loaded else "not loaded")
    found["container"] = facts.container or ("WSL" if facts.wsl else "none")
    overlays = ", ".join(f"{count} {state}" for state, count in facts.transformers.overlays.items())
    found["overlays"] = overlays or facts.transformers.refused or "none"
    found |= {name: facts.packages[name] for name in PACKAGES if facts.packages.get(name)}
    return found


def _aligned(found: Mapping[str, str]) -> str:
    column = max(map(len, found))
    return "\n".join(f"{label:<{column}}  {value}" for label, value in found.items())


def _user(environment: Mapping[str, str]) -> str:
    try:
        return environment.get("USER") or getpass.getuser()
    except (OSError, KeyError, ImportError):  # a user without an entry, as in many containers
        return ""
