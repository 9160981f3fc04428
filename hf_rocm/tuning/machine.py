"""For which GPU and which release of aiter: what every tuned row holds for and nothing else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hf_rocm import options
from hf_rocm.errors import OptionError, TuningError
from hf_rocm.overlay.facts import aiter_facts
from hf_rocm.tuning.columns import LAYOUTS, NEWEST, Layout, layout_of, layouts_with


class Gpu(NamedTuple):
    """What aiter tells GPUs apart by. units: compute units, which partitioned and cut-down ones have fewer of."""

    gfx: str
    units: int

    def __str__(self) -> str:
        return f"{self.gfx}, {self.units} compute units"

    @property
    def folder(self) -> str:
        return f"{self.gfx}-{self.units}"


@dataclass(frozen=True)
class Release:
    """A release of aiter. folder: the package, or None if the release was only named."""

    version: str
    layout: Layout
    folder: Path | None = None

    @property
    def tuner(self) -> Path | None:
        """The script that tunes, where the package has its sources: beside it, or in `aiter_meta` (wheels)."""
        for root in self._roots():
            if (root / self.layout.tuner).is_file():
                return root / self.layout.tuner
        return None

    @property
    def shipped(self) -> list[Path]:
        """The tables that the package comes with, the general one first."""
        if self.folder is None:
            return []
        configs = self.folder / "configs"
        models = sorted(configs.glob("model_configs/*bf16_tuned_gemm*.csv"))
        found = [configs / self.layout.table, *(each for each in models if "untuned" not in each.name)]
        return [each for each in found if each.is_file() and each.stat().st_size]

    def _roots(self) -> list[Path]:
        return [] if self.folder is None else [self.folder.parent / "aiter_meta", self.folder.parent]


def installed() -> Release | None:
    """The aiter of this environment, read off its files. Raises `TuningError` if its tables are of a new kind."""
    facts = aiter_facts()
    if facts.path is None or not facts.amd:
        return None
    folder = Path(facts.path)
    found = Release(facts.version or NEWEST, layout_of(facts.version or NEWEST), folder)
    columns = _shipped_columns(folder)
    if columns is None or set(columns) == set(found.layout.tuned):
        return found
    layouts = layouts_with(columns)  # a build from source, whose version says little
    if not layouts:
        raise TuningError(
            f"the tables of amd-aiter {facts.version} have columns that hf_rocm has not seen",
            facts={"found": ",".join(columns)[:300], "known": f"those of {LAYOUTS[0].since} to {NEWEST}"},
            hint="update hf-rocm, or tune with that release's own tuner",
        )
    with_tuner = [each for each in layouts if Release("", each, folder).tuner is not None]
    return Release(found.version, (with_tuner or layouts)[-1], folder)


def release(named: str | None = None) -> Release:
    """The release that is named, else the installed one, else the newest that is known."""
    here = installed()
    if here is not None and named in (None, here.version):
        return here
    return Release(named or NEWEST, layout_of(named or NEWEST))


def gpu(named: str | None = None) -> Gpu | None:
    """The GPU that is named (`gfx942:304`), else the one that aiter would see here, else None. May open the device."""
    if named is not None:
        match = re.fullmatch(r"(gfx[0-9a-f]{3,5}):([1-9][0-9]{0,3})", named)
        if match is None:
            raise OptionError(
                f"{named!r} is not a GPU", hint="write the architecture and its compute units: gfx942:304 is an MI300X"
            )
        return Gpu(match[1], int(match[2]))
    gfx, units = options.aiter_machine()
    if gfx and units:
        return Gpu(gfx, units)
    import torch

    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    name = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
    return Gpu(gfx or name, units or int(properties.multi_processor_count))


def _shipped_columns(folder: Path) -> tuple[str, ...] | None:
    for name in dict.fromkeys(layout.table for layout in reversed(LAYOUTS)):
        try:
            with (folder / "configs" / name).open("rb") as file:
                line = file.readline(4096)
        except OSError:
            continue
        if line.strip():
            return tuple(each.strip() for each in line.decode("utf-8", "replace").split(","))
    return None
