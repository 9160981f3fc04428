"""The differences between the architectures that affect the meaning of instructions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Target:
    """One architecture. Equal targets execute the same instructions in the same way.

    lanes: the number of lanes of a wave. generation: 9 (CDNA), 11 (RDNA 3 and 3.5) or 12 (RDNA 4). counters: for each
    kind of memory operation ("load", "store", "lds", "scalar"), the counter that it increments. limits: the maximum of
    each counter, at which a wave waits. fnuz: 8-bit floats have no negative zero and no infinity, as on gfx942.
    flushes_matrix: MFMA of 16-bit floats flushes subnormal numbers, as on gfx90a. eight_bit: has conversions and
    matrix instructions for 8-bit floats. scalar_float: has scalar floating-point instructions.
    """

    name: str = field(compare=False)
    lanes: int
    generation: int
    counters: Mapping[str, str]
    limits: Mapping[str, int]
    fnuz: bool = False
    flushes_matrix: bool = False
    eight_bit: bool = True
    scalar_float: bool = False

    @property
    def cdna(self) -> bool:
        return self.generation == 9

    @property
    def mask_words(self) -> int:
        """The number of SGPRs of a lane mask."""
        return self.lanes // 32


_GFX9 = {"load": "vm", "store": "vm", "lds": "lgkm", "scalar": "lgkm"}
_GFX11 = {"load": "vm", "store": "vs", "lds": "lgkm", "scalar": "lgkm"}
_GFX12 = {"load": "load", "store": "store", "lds": "ds", "scalar": "km"}
_LIMITS9 = {"vm": 63, "lgkm": 15}
_LIMITS11 = {"vm": 63, "vs": 63, "lgkm": 63}
_LIMITS12 = {"load": 63, "store": 63, "ds": 63, "km": 31}

TARGETS: Mapping[str, Target] = {
    "gfx90a": Target("gfx90a", 64, 9, _GFX9, _LIMITS9, flushes_matrix=True, eight_bit=False),
    "gfx942": Target("gfx942", 64, 9, _GFX9, _LIMITS9, fnuz=True),
    "gfx950": Target("gfx950", 64, 9, _GFX9, _LIMITS9),
    "gfx1100": Target("gfx1100", 32, 11, _GFX11, _LIMITS11, eight_bit=False),
    "gfx1150": Target("gfx1150", 32, 11, _GFX11, _LIMITS11, eight_bit=False, scalar_float=True),
    "gfx1151": Target("gfx1151", 32, 11, _GFX11, _LIMITS11, eight_bit=False, scalar_float=True),
    "gfx1200": Target("gfx1200", 32, 12, _GFX12, _LIMITS12, scalar_float=True),
    "gfx1201": Target("gfx1201", 32, 12, _GFX12, _LIMITS12, scalar_float=True),
}
