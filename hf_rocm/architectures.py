"""The GPU architectures of AMD that matter here, and what aiter and Triton are for each: facts that need no torch."""

from __future__ import annotations

import re
from typing import NamedTuple

# CDNA 2, 3 and 4: what aiter's CK and assembly kernels are made for
INSTINCT = ("gfx90a", "gfx942", "gfx950")
# RDNA 3, 3.5 and 4, where AMD lists only the plain HIP and the Triton kernels, as experimental
RADEON = ("gfx1100", "gfx1151", "gfx1201")
# what hf_rocm's own Triton kernels are compiled for in its tests, without a GPU
BUILT_AHEAD = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")


class Architecture(NamedTuple):
    """One architecture. cards: what it is sold as; wave: lanes of a wavefront; integrated: part of a CPU."""

    gfx: str
    family: str
    cards: str
    wave: int
    integrated: bool = False


KNOWN = {
    each.gfx: each
    for each in (
        Architecture("gfx906", "GCN 5", "Instinct MI50, MI60, Radeon VII", 64),
        Architecture("gfx908", "CDNA 1", "Instinct MI100", 64),
        Architecture("gfx90a", "CDNA 2", "Instinct MI210, MI250", 64),
        Architecture("gfx942", "CDNA 3", "Instinct MI300A, MI300X, MI325X", 64),
        Architecture("gfx950", "CDNA 4", "Instinct MI350X, MI355X", 64),
        Architecture("gfx1030", "RDNA 2", "Radeon RX 6800, 6900", 32),
        Architecture("gfx1036", "RDNA 2", "the graphics of Ryzen 7000 and 9000", 32, integrated=True),
        Architecture("gfx1100", "RDNA 3", "Radeon RX 7900, PRO W7900", 32),
        Architecture("gfx1101", "RDNA 3", "Radeon RX 7700, 7800", 32),
        Architecture("gfx1102", "RDNA 3", "Radeon RX 7600", 32),
        Architecture("gfx1103", "RDNA 3", "the graphics of Ryzen 7040 and 8040", 32, integrated=True),
        Architecture("gfx1150", "RDNA 3.5", "Ryzen AI 300 (Strix Point)", 32, integrated=True),
        Architecture("gfx1151", "RDNA 3.5", "Ryzen AI Max (Strix Halo)", 32, integrated=True),
        Architecture("gfx1200", "RDNA 4", "Radeon RX 9060", 32),
        Architecture("gfx1201", "RDNA 4", "Radeon RX 9070, AI PRO R9700", 32),
    )
}


def tiers(gfx: str) -> dict[str, str]:
    """What the tiers with kernels of their own are for this architecture, in words."""
    if gfx in INSTINCT:
        aiter = "every kernel"
    elif gfx in RADEON:
        aiter = "plain HIP and Triton kernels only (AMD: experimental)"
    else:
        aiter = "no kernel"
    triton = "compiled for it in tests" if gfx in BUILT_AHEAD else "not compiled for it in tests"
    return {"aiter": aiter, "triton": triton}


def gfx_of_version(text: str) -> str | None:
    """`11.0.0`, as HSA_OVERRIDE_GFX_VERSION has it, to `gfx1100`; None if it isn't of that form.

    The minor number and the stepping are hexadecimal digits in the name: 9.0.10 is gfx90a.
    """
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", text.strip())
    if match is None:
        return None
    major, minor, stepping = (int(each) for each in match.groups())
    return f"gfx{major}{minor:x}{stepping:x}"


def gfx_of_target(number: int) -> str | None:
    """The driver's `gfx_target_version` (90402 is gfx942, 110501 gfx1151) as a name; None for a CPU's 0."""
    if number <= 0:
        return None
    return gfx_of_version(f"{number // 10000}.{number // 100 % 100}.{number % 100}")
