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
    """Whether this torch was built for ROCm. Reads a constant; initialises nothing.

    For code that must differ between the two, such as a compile mode or a kernel's launch parameters, and is asked at
    import: worker processes may still be forked afterwards. It says nothing about a GPU: ask `gpu_available`.
    """
    return torch.version.hip is not None


def gpu_available() -> bool:
    """Whether torch can use a GPU here, AMD's or NVIDIA's.

    In place of pynvml, which knows NVIDIA's only and fails at import or at its first call elsewhere. Where torch
    counts GPUs without opening them (ROCm and CUDA builds since 2.4 on one node), processes may still be forked.
    """
    return torch.cuda.is_available() and torch.cuda.device_count() > 0


def gpu_arch(device: torch.device | str | int | None = None) -> str | None:
    """The architecture of an AMD GPU, such as `gfx942` (MI300X), without its feature flags; None elsewhere.

    device: a torch device, its name or its index; by default the current GPU. For code that picks a kernel, a build
    flag or a table by architecture; it opens the device, so don't ask at import. On NVIDIA, on the CPU and where no
    GPU can be used it is None and nothing is raised: `torch.cuda.get_device_capability` has NVIDIA's numbers.
    """
    if not is_rocm() or not gpu_available():
        return None
    named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    if named.type == "cuda" and named.index is None:
        named = torch.device("cuda", torch.cuda.current_device())
    return describe(named).arch


@cache
def describe(device: torch.device) -> Device:
    """The facts about one torch device."""
    if device.type != "cuda" or not is_rocm():
        return Device(device.type, rocm=False)
    name = str(getattr(torch.cuda.get_device_properties(device), "gcnArchName", ""))
    return Device(device.type, rocm=True, arch=name.split(":")[0] or None)
