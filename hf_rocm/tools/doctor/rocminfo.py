"""Parse the output of `rocminfo` into agents."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Agent:
    """One GPU agent. name: the architecture that the runtime assumes. card: the marketing name."""

    name: str
    card: str = ""
    units: int = 0


def agents(text: str) -> tuple[Agent, ...]:
    """Return the GPU agents in rocminfo's output, in order. CPUs and NPUs are left out."""
    agents_read = []
    for part in re.split(r"^\*+\s*\nAgent \d+\s*\n\*+\s*$", text, flags=re.MULTILINE)[1:]:
        head = part.split("Pool Info", 1)[0]
        name, kind = _value(head, "Name"), _value(head, "Device Type")
        if kind == "GPU" and name.startswith("gfx"):
            units = _value(head, "Compute Unit")
            agents_read.append(Agent(name, _value(head, "Marketing Name"), int(units) if units.isdecimal() else 0))
    return tuple(agents_read)


def complaint(text: str) -> str | None:
    """Return the error line if rocminfo could not list any agent, else None."""
    for line in text.splitlines():
        if "Unable to open /dev/kfd" in line or "is not loaded" in line or "api call failure" in line:
            return line.strip()
    return None


def _value(text: str, label: str) -> str:
    match = re.search(rf"^  {re.escape(label)}:[ \t]*(.*?)[ \t]*$", text, re.MULTILINE)
    return match[1] if match else ""
