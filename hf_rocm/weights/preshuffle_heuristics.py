"""The known gains from shuffled weights, on which `preshuffle="auto"` is based.

None of them was measured for hf_rocm, because no AMD GPU was available. An entry is a published measurement of the
same kernels. It applies only to its GPU, dtype and sizes, and requires its release of aiter or a later one. The
minimum number of rows for which shuffled weights are used is the option `preshuffle_threshold`, not the entry's `rows`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_rocm.device import Device
from hf_rocm.ops.aiter import detect


class Gain(NamedTuple):
    """One measurement: GPU, first release of aiter with the kernel, dtype, and the number that must divide N and K."""

    arch: str
    aiter: str
    dtype: torch.dtype
    multiple: int
    # The smallest number of rows for which there is a gain.
    rows: int
    source: str


KNOWN = (
    Gain(
        arch="gfx950",
        aiter="0.1.7.post3",
        dtype=torch.bfloat16,
        multiple=64,
        rows=128,
        source="AMD's port of openpi, MI350: assembly kernels on shuffled weights are 20 to 32 % faster at M = 788 in "
        "isolation, and slower for few rows",
    ),
)


def unknown(weight: Tensor, device: Device) -> str | None:
    """Return a sentence if no gain is known for this weight [N, K] on this device, else None."""
    entries = [gain for gain in KNOWN if gain.arch == device.arch]
    if not entries:
        return f"no gain is known on {device.arch or device.kind}; preshuffle='all' shuffles anyway"
    release = detect.load()
    n, k = weight.shape
    for gain in entries:
        fits = weight.dtype == gain.dtype and n % gain.multiple == 0 and k % gain.multiple == 0
        if fits and isinstance(release, detect.Release) and release.at_least(gain.aiter):
            return None
    return f"no gain is known on {device.arch} for {weight.dtype}, {tuple(weight.shape)} with the installed aiter"
