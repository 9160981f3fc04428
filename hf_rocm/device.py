"""What machine this is: ROCm or not, the GPU's architecture, the torch build.

Probed once and lazily; nothing here imports aiter or touches a device before it is asked about that device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Device:
    """One device as the predicates see it.

    kind: `cpu`, `cuda` (NVIDIA or ROCm) or another torch device type. rocm: a ROCm torch drives it.
    arch: the gfx name without feature flags (`gfx942`) on ROCm, else None.
    """

    kind: str
    rocm: bool
    arch: str | None = None


def is_rocm() -> bool:
    """Whether this torch was built for ROCm. Reads a constant; initialises nothing."""
    return torch.version.hip is not None


@cache
def describe(device: torch.device) -> Device:
    """The facts about one torch device."""
    if device.type != "cuda" or not is_rocm():
        return Device(device.type, rocm=False)
    name = str(getattr(torch.cuda.get_device_properties(device), "gcnArchName", ""))
    return Device(device.type, rocm=True, arch=name.split(":")[0] or None)
