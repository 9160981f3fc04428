"""Whether the installed Triton can serve a device, determined once per process.

torch installs its own Triton, which is imported lazily. A process on a CPU imports it only if the kernels are
interpreted (`TRITON_INTERPRET=1`), to test them without a GPU.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache

from packaging.version import InvalidVersion, Version

from hf_rocm import options
from hf_rocm.device import Device
from hf_rocm.ops import probe
from hf_rocm.ops.probe import Probe

# the release for torch 2.6; older ones lack language features that the kernels use
OLDEST = Version("3.2")


@dataclass(frozen=True)
class Release:
    """The Triton that was imported. drivers: the backends (`amd`, `nvidia`) that have found a GPU."""

    version: Version
    drivers: frozenset[str]


def unavailable(device: Device) -> str | None:
    """Why no Triton kernel can serve this device, or None. Imports triton if everything else is in order."""
    interpreted = options.triton_interprets()
    if device.kind == "cpu" and not interpreted:
        return "Triton's kernels need a GPU, but this is the CPU (TRITON_INTERPRET=1 runs them there, for tests)"
    if device.kind not in ("cpu", "cuda"):
        return f"Triton's kernels need an AMD or NVIDIA GPU, but this device is of type {device.kind}"
    loaded = load()
    if isinstance(loaded, str):
        return loaded
    backend = "amd" if device.rocm else "nvidia"
    if not interpreted and backend not in loaded.drivers:
        return f"Triton {loaded.version} finds no {backend.upper()} GPU that it supports"
    return None


def checked(operation: str, name: str) -> Probe:
    """The probe of a Triton kernel. Its result is valid for the installed release of Triton."""
    return probe.checked(operation, name, tier="triton", version=lambda: str(release().version))


def release() -> Release:
    """Return the imported Triton. Call this function only after `unavailable` has returned None."""
    loaded = load()
    assert isinstance(loaded, Release)
    return loaded


@cache
def load() -> Release | str:
    """Import triton, once. Returns the release, or the reason (a sentence) why it can't be used."""
    try:
        triton = importlib.import_module("triton")
        backends = importlib.import_module("triton.backends").backends
        drivers = frozenset(name for name, backend in backends.items() if backend.driver.is_active())
    except ModuleNotFoundError as error:
        if error.name != "triton":
            return f"Triton can't be imported here: {error}"
        return "Triton is not installed (a ROCm build of torch includes its own)"
    except Exception as error:  # noqa: BLE001 - the import runs compilers and drivers, which may raise anything
        lines = str(error).strip().splitlines() or ["no message"]
        return f"Triton can't be imported here: {type(error).__name__}: {lines[0]}"
    try:
        version = Version(str(triton.__version__))
    except InvalidVersion:
        return f"Triton has a version that can't be read: {triton.__version__!r}"
    if version.release < OLDEST.release:
        return f"the kernels need Triton {OLDEST} or newer, but this is {version}"
    return Release(version, drivers)
