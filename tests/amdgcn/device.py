"""The AMD GPUs whose machine code the tests execute: the device properties that Triton and hf_rocm read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_rocm.device import Device
from hf_rocm.ops.triton.builds import ARCHITECTURES, SHARED_MEMORY


@dataclass(frozen=True)
class Gpu:
    """One GPU. lanes: lanes per wave; lds: maximum bytes of LDS per workgroup; units: compute units as HIP
    counts them."""

    arch: str
    lanes: int
    lds: int
    units: int

    def described(self) -> Device:
        """The result of `hf_rocm.device.describe` for this GPU."""
        return Device("cuda", rocm=True, arch=self.arch, units=self.units)


# Compute units as HIP counts them. On RDNA, HIP counts pairs of compute units. gfx1150 and gfx1151 are the GPUs of a
# Ryzen AI 9 HX 370 and of a Ryzen AI Max+ 395.
_UNITS = {
    "gfx90a": 110,  # MI250X, one die
    "gfx942": 304,  # MI300X
    "gfx950": 256,  # MI355X
    "gfx1100": 48,  # RX 7900 XTX
    "gfx1150": 8,  # Radeon 890M
    "gfx1151": 20,  # Radeon 8060S
    "gfx1200": 16,  # RX 9060 XT
    "gfx1201": 32,  # RX 9070 XT
}

GPUS: Mapping[str, Gpu] = {
    arch: Gpu(arch, lanes, SHARED_MEMORY.get(arch, 64 * 1024), _UNITS[arch]) for arch, lanes in ARCHITECTURES.items()
}
