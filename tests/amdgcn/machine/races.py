"""Detect races: two waves access the same byte between two barriers, and at least one of them writes it.

Accesses are recorded during execution and compared at the end of the interval (LDS) or of the launch (global memory).
The result does not depend on the order in which the waves ran. An access that is still in flight at a barrier also
belongs to the next interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import Race


@dataclass(eq=False)
class Access:
    """One instruction's accesses. places: int64 [n], byte offsets divided by `unit`; `repeat` consecutive units are
    accessed at each of them. owner: wave numbers [n], or (waves, lane mask or True, whether there is one
    address per wave, lanes per wave) to compute them from. first, last: the intervals between barriers to which the
    access belongs. values: the stored values."""

    index: int
    writes: bool
    unit: int
    repeat: int
    places: np.ndarray
    owner: Any
    first: int
    last: int = field(default=-1)
    values: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.last < 0:
            self.last = self.first

    def spots(self, unit: int) -> np.ndarray:
        """The places in a narrower unit: [n, self.unit // unit * repeat]."""
        ratio = self.unit // unit * self.repeat
        return (self.places * (self.unit // unit))[:, None] + np.arange(ratio)

    def waves(self) -> np.ndarray:
        """The wave number for every place: [n]."""
        if isinstance(self.owner, tuple):
            waves, lanes, per_wave, count = self.owner
            if not per_wave:
                waves = np.repeat(waves, count)
                waves = waves if lanes is True else waves[lanes.reshape(-1)]
            self.owner = waves
        return self.owner

    def owners(self) -> np.ndarray:
        """The wave number for every place, starting at 1: uint32 [n, 1]."""
        return self.waves().astype(np.uint32)[:, None] + np.uint32(1)

    def in_units(self, unit: int) -> np.ndarray:
        """The stored values as integers: [n, parts, words per part]."""
        assert self.values is not None
        return self.values.view(np.dtype(f"u{min(unit, 8)}")).reshape(len(self.places), -1, max(1, unit // 8))


def check_interval(
    accesses: Sequence[Access], size: int, texts: Sequence[str], where: str, agent: str = "wave"
) -> None:
    """Raise `Race` if two waves accessed the same byte in one interval and at least one of them wrote it.

    Waves may write the same value to one place: replicated layouts do this. size: memory size in bytes. texts: the
    instructions, for the message. agent: what the owner numbers of the accesses count, for the message.
    """
    writes = [access for access in accesses if access.writes]
    if not writes:
        return
    unit = min(access.unit for access in accesses)
    writer = np.zeros(size // unit + 1, np.uint32)
    for access in writes:
        writer[access.spots(unit)] = access.owners()
    for access in accesses:
        owner = writer[access.spots(unit)]
        clash = owner != access.owners()
        if not access.writes:
            clash &= owner != 0
        if clash.any():
            clash &= ~_harmless(access, writes, unit, size)
        if clash.any():
            lane, part = np.argwhere(clash)[0]
            raise Race(_describe(access, int(lane), access.spots(unit)[lane, part], writes, unit, texts, where, agent))


def _harmless(access: Access, writes: Sequence[Access], unit: int, size: int) -> np.ndarray:
    """Which writes store the final value, or which reads are by a wave that also stored it: bool [n, parts]."""
    dtype = np.dtype(f"u{min(unit, 8)}")
    content = np.zeros((size // unit + 1, max(1, unit // 8)), dtype)
    for write in writes:
        content[write.spots(unit)] = write.in_units(unit)
    spots = access.spots(unit)
    if access.writes:
        return (content[spots] == access.in_units(unit)).all(2)
    # one key per place and wave that wrote the place's final value
    limit = 1 + max(int(write.waves().max()) for write in (*writes, access))
    keys = []
    for write in writes:
        same = (content[write.spots(unit)] == write.in_units(unit)).all(2)
        keys.append((write.spots(unit) * limit + write.waves()[:, None])[same])
    return np.isin(spots * limit + access.waves()[:, None], np.concatenate(keys))


def _describe(
    access: Access,
    lane: int,
    spot: int,
    writes: Sequence[Access],
    unit: int,
    texts: Sequence[str],
    where: str,
    agent: str,
) -> str:
    own = int(access.waves()[lane])
    first = f"{agent} {own} at {access.index} ({texts[access.index]!r})"
    for write in writes:
        others = write.waves()[np.argwhere(write.spots(unit) == spot)[:, 0]]
        others = others[others != own]
        if others.size:
            return (
                f"{first} and {agent} {others[0]} at {write.index} ({texts[write.index]!r}) "
                f"access byte {spot * unit} of {where} with no barrier between them"
            )
    return f"{first} stores two values to byte {spot * unit} of {where}"


def check_launch(accesses: Sequence[Access], size: int, per_group: int, texts: Sequence[str], where: str) -> None:
    """Check one global buffer. Raises `Race`. Barriers order only the waves of the same workgroup.

    If no wave writes a place that another wave accesses, there is no race. Otherwise no workgroup may write a place
    that another one accesses, and within a workgroup every interval is checked separately.
    """
    try:
        check_interval(accesses, size, texts, where)
        return
    except Race:
        pass
    groups = [_regrouped(access, per_group) for access in accesses]
    check_interval(groups, size, texts, where, "workgroup")
    for interval in range(max(access.last for access in accesses) + 1):
        present = [access for access in accesses if access.first <= interval <= access.last]
        check_interval(present, size, texts, where)


def _regrouped(access: Access, per_group: int) -> Access:
    groups = access.waves() // per_group
    return Access(
        access.index, access.writes, access.unit, access.repeat, access.places, groups, 0, values=access.values
    )
