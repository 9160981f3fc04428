"""Facts about this machine: the torch build (ROCm or not), the GPU's architecture, and the sizes of memory.

They are read lazily, and those that can't change are cached. Nothing here imports aiter, and no device is opened before
a function needs it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from hf_rocm.architectures import CARVED_OUT, KNOWN, least_of_cards, system_file
from hf_rocm.budget import of_one_pool


@dataclass(frozen=True)
class Device:
    """The facts about a device that predicates depend on.

    kind: `cpu`, `cuda` (NVIDIA or ROCm) or another torch device type. rocm: True for a GPU of a ROCm build of torch.
    arch: the gfx name without feature flags (`gfx942`) on ROCm, else None. units: number of compute units on ROCm.
    integrated: whether it is an AMD GPU that shares the host's memory.
    """

    kind: str
    rocm: bool
    arch: str | None = None
    units: int | None = field(default=None, compare=False)
    integrated: bool = field(default=False, compare=False)


def is_rocm() -> bool:
    """Return whether this torch was built for ROCm. Reads a constant and initialises nothing.

    Use it where ROCm and CUDA need different code, such as a compile mode or a kernel's launch parameters. It is safe
    at import time: worker processes can still be forked afterwards. It does not check for a GPU: see `gpu_available`.
    """
    return torch.version.hip is not None


def gpu_available() -> bool:
    """Return whether torch can use a GPU on this machine, AMD or NVIDIA.

    Use it instead of pynvml, which supports only NVIDIA GPUs and fails elsewhere. By default, torch
    calls the CUDA or HIP runtime, after which worker processes that use the GPU can no longer be forked. With
    `PYTORCH_NVML_BASED_CUDA_CHECK=1`, torch reads the number of GPUs from NVML or AMD SMI instead, if it can.
    """
    return torch.cuda.is_available() and torch.cuda.device_count() > 0


def gpu_arch(device: torch.device | str | int | None = None) -> str | None:
    """Return the architecture of an AMD GPU without feature flags, such as `gfx942` (MI300X), or None.

    device: a torch device, its name or its index; default: the current GPU. Use the result to select a kernel, a build
    flag or a table. The call opens the device, so do not call this function at import time. Returns None instead of
    raising on NVIDIA, on the CPU and without a usable GPU; for NVIDIA see `torch.cuda.get_device_capability`.
    """
    if not is_rocm() or not gpu_available():
        return None
    named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    if named.type == "cuda" and named.index is None:
        named = torch.device("cuda", torch.cuda.current_device())
    return describe(named).arch


@cache
def describe(device: torch.device) -> Device:
    """Return the facts about one torch device."""
    if device.type in _simulated:
        return _simulated[device.type]
    if device.type != "cuda" or not is_rocm():
        return Device(device.type, rocm=False)
    properties = torch.cuda.get_device_properties(device)
    name = str(getattr(properties, "gcnArchName", ""))
    units = getattr(properties, "multi_processor_count", None)
    arch = name.split(":")[0] or None
    integrated = bool(getattr(properties, "is_integrated", False)) or (arch in KNOWN and KNOWN[arch].integrated)
    return Device(device.type, rocm=True, arch=arch, units=units, integrated=integrated)


def total_memory(device: torch.device) -> int:
    """Return the memory of a device in bytes; for a GPU that shares the host's memory, the size of the shared memory.

    For such a GPU, HIP reports the part that the firmware reserved, the pages that the driver may map, or their sum.
    """
    if device.type != "cuda":
        return _host_memory()
    total: int = torch.cuda.get_device_properties(device).total_memory
    return of_one_pool(total, _host_memory(), _carved_out()) if describe(device).integrated else total


def free_memory(device: torch.device) -> int:
    """Return the free memory of a GPU in bytes.

    For a GPU that shares the host's memory, HIP does not subtract the memory of the host's processes, and may report
    more than the total. The result is then limited to the available memory of the host plus the part that the firmware
    reserved, and to the total.
    """
    free, _ = torch.cuda.mem_get_info(device)
    if not describe(device).integrated:
        return free
    return min(of_one_pool(free, available(), _carved_out()), total_memory(device))


def available() -> int:
    """Return Linux's estimate of how many bytes of the host's memory can be used without swapping.

    Returns the size of the host's memory if Linux provides no estimate.
    """
    match = re.search(r"^MemAvailable:\s+(\d+) kB", system_file("/proc/meminfo") or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else _host_memory()


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@cache
def _carved_out() -> int:
    return least_of_cards(system_file(str(path)) for path in Path("/").glob(CARVED_OUT))


_simulated: dict[str, Device] = {}


@contextmanager
def simulated(kind: str, device: Device) -> Iterator[None]:
    """Describe torch devices of type `kind` as `device`, for tests that execute AMD GPU code on the CPU."""
    _simulated[kind] = device
    describe.cache_clear()
    try:
        yield
    finally:
        del _simulated[kind]
        describe.cache_clear()
