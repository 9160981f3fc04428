"""The GPU and the release of aiter. A tuned row is valid for only one kind of GPU and one release."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hf_rocm import options
from hf_rocm.errors import OptionError, TuningError
from hf_rocm.ops.aiter.tables.columns import LAYOUTS, NEWEST, Layout, layout_of, layouts_with
from hf_rocm.overlay.facts import aiter_facts


class Gpu(NamedTuple):
    """The properties by which aiter distinguishes GPUs.

    units: the number of compute units, which is smaller for partitioned and cut-down GPUs.
    """

    gfx: str
    units: int

    def __str__(self) -> str:
        return f"{self.gfx}, {self.units} compute units"

    @property
    def folder(self) -> str:
        return f"{self.gfx}-{self.units}"


@dataclass(frozen=True)
class Release:
    """A release of aiter. folder: the folder of the package, or None if it is not installed here."""

    version: str
    layout: Layout
    folder: Path | None = None

    @property
    def tuner(self) -> Path | None:
        """The tuning script, if the package includes it: next to the package, or in `aiter_meta` (wheels)."""
        for root in self._roots():
            if (root / self.layout.tuner).is_file():
                return root / self.layout.tuner
        return None

    @property
    def shipped(self) -> list[Path]:
        """The tables that the package ships, with the general one first."""
        if self.folder is None:
            return []
        configs = self.folder / "configs"
        models = sorted(configs.glob("model_configs/*bf16_tuned_gemm*.csv"))
        tables = [configs / self.layout.table, *(table for table in models if "untuned" not in table.name)]
        return [table for table in tables if table.is_file() and table.stat().st_size]

    def _roots(self) -> list[Path]:
        return [] if self.folder is None else [self.folder.parent / "aiter_meta", self.folder.parent]


def installed() -> Release | None:
    """The aiter of this environment, as determined from its files, or None if AMD's aiter is not installed.

    Raises `TuningError` if hf_rocm does not support its tables.
    """
    facts = aiter_facts()
    if facts.path is None or not facts.amd:
        return None
    folder = Path(facts.path)
    release = Release(facts.version or NEWEST, layout_of(facts.version or NEWEST), folder)
    columns = _shipped_columns(folder)
    if columns is None or set(columns) == set(release.layout.tuned):
        return release
    # The version of a build from source does not determine the layout.
    layouts = layouts_with(columns)
    if not layouts:
        raise TuningError(
            f"the tables of amd-aiter {facts.version} have columns that hf_rocm does not support",
            facts={"found": ",".join(columns)[:300], "known": f"those of {LAYOUTS[0].since} to {NEWEST}"},
            hint="update hf-rocm, or tune with that release's own tuner",
        )
    with_tuner = [layout for layout in layouts if Release("", layout, folder).tuner is not None]
    return Release(release.version, (with_tuner or layouts)[-1], folder)


def release(named: str | None = None) -> Release:
    """The named release, else the installed one, else the newest known one."""
    here = installed()
    if here is not None and named in (None, here.version):
        return here
    return Release(named or NEWEST, layout_of(named or NEWEST))


def gpu(named: str | None = None) -> Gpu | None:
    """The named GPU (`gfx942:304`), else the one that aiter would use here, else None. May open the device.

    Raises `OptionError` if the name has another form.
    """
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
            return tuple(column.strip() for column in line.decode("utf-8", "replace").split(","))
    return None
