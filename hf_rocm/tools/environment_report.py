"""The block of text that `hf-rocm env` prints: facts about the machine for a GitHub issue, without private data."""

from __future__ import annotations

import getpass
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from hf_rocm.tools import redact
from hf_rocm.tools.doctor.examine import report, summary
from hf_rocm.tools.doctor.facts import Facts
from hf_rocm.tools.doctor.report import Level

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
    """Return the text of the report, without private data."""
    parts = [_aligned(_machine(facts))]
    variables = redact.variables(facts.environment)
    if variables:
        parts.append("\n".join(f"{name}={value}" for name, value in variables.items()))
    findings = [finding for finding in report(facts).findings if finding.level is not Level.OK]
    lines = (f"{finding.level.value}: {finding.check}: {finding.what}" for finding in findings)
    parts.append("\n".join(lines) or "doctor: all ok")
    return redact.clean(
        "\n\n".join(parts),
        home=facts.environment.get("HOME", ""),
        user=_user(facts.environment),
        host=platform.node(),
        paths=_paths(asdict(facts)),
    )


def _paths(value: object) -> Iterator[str]:
    """Yield the absolute paths in the facts: whole strings, and the parts of strings that colons separate.

    Findings contain these paths, and no pattern can detect where a path with spaces ends.
    """
    if isinstance(value, Mapping):
        value = [*value.values(), *value]
    if isinstance(value, str):
        yield from (path for path in (value, *value.split(":")) if path.startswith("/"))
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _paths(item)


def _machine(facts: Facts) -> dict[str, str]:
    cards = dict.fromkeys(f"{agent.card} ({agent.name}, {agent.units} CUs)" for agent in facts.rocm.agents)
    opened = dict.fromkeys(f"{device['name']} ({device['arch']})" for device in facts.devices)
    rows = {**summary(facts)}
    rows["GPU"] = ", ".join(cards or opened) or rows["GPU"]
    rows["driver"] = facts.driver.version or ("amdgpu" if facts.driver.loaded else "not loaded")
    rows["container"] = facts.container or ("WSL" if facts.wsl else "none")
    overlays = ", ".join(f"{count} {state}" for state, count in facts.transformers.overlays.items())
    rows["overlays"] = overlays or facts.transformers.refused or "none"
    rows |= {name: facts.packages[name] for name in PACKAGES if facts.packages.get(name)}
    return rows


def _aligned(rows: Mapping[str, str]) -> str:
    column = max(map(len, rows))
    return "\n".join(f"{label:<{column}}  {value}" for label, value in rows.items())


def _user(environment: Mapping[str, str]) -> str:
    try:
        return environment.get("USER") or getpass.getuser()
    except (OSError, KeyError, ImportError):
        # The user has no passwd entry, as in many containers.
        return ""
