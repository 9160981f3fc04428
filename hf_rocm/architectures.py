"""AMD's GPU architectures, and what aiter and Triton support on them. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

# CDNA 2, 3 and 4: the targets of aiter's CK and assembly kernels
INSTINCT = ("gfx90a", "gfx942", "gfx950")
# RDNA 3, 3.5 and 4: for these, AMD lists only plain HIP and Triton kernels, as experimental
RADEON = ("gfx1100", "gfx1151", "gfx1201")
# the newest aiter that hf_rocm's calls were checked against: the sources of 2026-08-22, 46 commits after 0.1.20
NEWEST_AITER = "0.1.21.dev46"
# the driver's description of the machine, with one folder per CPU or GPU
KFD_NODES = "/sys/class/kfd/kfd/topology/nodes"
# the version of the driver from AMD's packages; the driver that is part of Linux has no separate version
DRIVER = "/sys/module/amdgpu/version"
# the files, relative to /, that contain the size of a graphics card's memory in bytes; for a GPU that shares the host's
# memory, this is the size of the part that the firmware reserved
CARVED_OUT = "sys/class/drm/card*/device/mem_info_vram_total"
# the tests compile hf_rocm's Triton kernels for these architectures without a GPU
BUILT_AHEAD = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1150", "gfx1151", "gfx1200", "gfx1201")


class Architecture(NamedTuple):
    """One architecture. cards: the product names; wave: the wavefront size; integrated: part of an APU."""

    gfx: str
    family: str
    cards: str
    wave: int
    integrated: bool = False


KNOWN = {
    architecture.gfx: architecture
    for architecture in (
        Architecture("gfx906", "GCN 5", "Instinct MI50, MI60, Radeon VII", 64),
        Architecture("gfx908", "CDNA 1", "Instinct MI100", 64),
        Architecture("gfx90a", "CDNA 2", "Instinct MI210, MI250", 64),
        Architecture("gfx942", "CDNA 3", "Instinct MI300A, MI300X, MI325X", 64),
        Architecture("gfx950", "CDNA 4", "Instinct MI350X, MI355X", 64),
        Architecture("gfx1030", "RDNA 2", "Radeon RX 6800, 6900", 32),
        Architecture("gfx1036", "RDNA 2", "integrated graphics of Ryzen 7000 and 9000", 32, integrated=True),
        Architecture("gfx1100", "RDNA 3", "Radeon RX 7900, PRO W7900", 32),
        Architecture("gfx1101", "RDNA 3", "Radeon RX 7700, 7800", 32),
        Architecture("gfx1102", "RDNA 3", "Radeon RX 7600", 32),
        Architecture("gfx1103", "RDNA 3", "integrated graphics of Ryzen 7040 and 8040", 32, integrated=True),
        Architecture("gfx1150", "RDNA 3.5", "Ryzen AI 300 (Strix Point)", 32, integrated=True),
        Architecture("gfx1151", "RDNA 3.5", "Ryzen AI Max (Strix Halo)", 32, integrated=True),
        Architecture("gfx1152", "RDNA 3.5", "Ryzen AI 300 (Krackan Point)", 32, integrated=True),
        Architecture("gfx1200", "RDNA 4", "Radeon RX 9060", 32),
        Architecture("gfx1201", "RDNA 4", "Radeon RX 9070, AI PRO R9700", 32),
    )
}


def tiers(gfx: str) -> dict[str, str]:
    """Return, for the aiter and the triton tier, what the tier supports on this architecture, in words."""
    if gfx in INSTINCT:
        aiter = "every kernel"
    elif gfx in RADEON:
        aiter = "only plain HIP and Triton kernels (experimental, according to AMD)"
    else:
        aiter = "no kernel"
    triton = "compiled for it in tests" if gfx in BUILT_AHEAD else "not compiled for it in tests"
    return {"aiter": aiter, "triton": triton}


def system_file(path: str) -> str | None:
    """Return the text of a system file, or None if it is not readable."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def driver_version(read: Callable[[str], str | None] = system_file) -> str | None:
    """Return the version of AMD's packaged amdgpu driver; None without a driver, or with the one that is part of Linux.

    read: a function that returns the text of a file, or None.
    """
    return (read(DRIVER) or "").strip() or None


def least_of_cards(texts: Iterable[str | None]) -> int:
    """Return the smallest of the memory sizes in these texts, in bytes; 0 if none is known.

    texts: for every card, the content of a file with a size, such as those of `CARVED_OUT`, or None. If one card is an
    integrated GPU, the smallest size is assumed to be its size.
    """
    return min((int(text) for text in texts if text and text.strip().isdecimal()), default=0)


def gfx_of_version(text: str) -> str | None:
    """Convert a value of HSA_OVERRIDE_GFX_VERSION, such as `11.0.0`, to `gfx1100`; return None for any other text.

    The minor number and the stepping are hexadecimal digits in the name: 9.0.10 is gfx90a.
    """
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", text.strip())
    if match is None:
        return None
    major, minor, stepping = (int(number) for number in match.groups())
    return f"gfx{major}{minor:x}{stepping:x}"


def gfx_of_target(number: int) -> str | None:
    """Convert the driver's `gfx_target_version` (90402 is gfx942, 110501 is gfx1151); return None for a CPU (0)."""
    if number <= 0:
        return None
    return gfx_of_version(f"{number // 10000}.{number // 100 % 100}.{number % 100}")


def gfx_of_node(properties: str) -> str | None:
    """Return the architecture in the `properties` file of a node in `KFD_NODES`; None for a CPU."""
    match = re.search(r"^gfx_target_version (\d+)$", properties, re.MULTILINE)
    return gfx_of_target(int(match[1])) if match else None
