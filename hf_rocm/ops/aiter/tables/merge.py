"""Merge several tables into one, before aiter reads them.

Given several files in AITER_CONFIG_GEMM_BF16, releases from 0.1.12 on rewrite them if they disagree, and older releases
drop rows. Releases that read the variable (all from 0.1.6.post1 on) ignore their own table if the variable names a
file. So hf_rocm passes one file with all rows to aiter.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_rocm.ops.aiter.tables.columns import Layout
from hf_rocm.ops.aiter.tables.machine import Gpu
from hf_rocm.ops.aiter.tables.table import Key, Row, Table

YOURS, TUNED, SHIPPED = "yours", "tuned here", "shipped"


@dataclass
class Share:
    """How many rows one file contributed to the merged table, and how many of its rows were left out, and why."""

    role: str
    path: Path
    taken: int = 0
    # Rows whose shape was already merged.
    repeated: int = 0
    # Rows for another GPU.
    elsewhere: int = 0
    # Rows for which the tuner found no kernel.
    failed: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "path": str(self.path)}


@dataclass
class Merged:
    """The merged table. rows: by the key under which the release looks them up."""

    layout: Layout
    rows: dict[Key, Row] = field(default_factory=dict)
    shares: list[Share] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The file's content: the columns of this release, in its order."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.layout.tuned)
        for row in self.rows.values():
            written = _written(row)
            writer.writerow([written.get(name, "") for name in self.layout.tuned])
        return out.getvalue()

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def merge(tables: Iterable[tuple[str, Table]], layout: Layout, gpu: Gpu | None) -> Merged:
    """Merge the tables. If `gpu` is given, other GPUs' rows are dropped. The first file with a shape wins.

    tables: (role, table) in order of preference. Tables that aiter ships may repeat shapes; among their rows the
    fastest one wins, as in aiter. Rows for which the tuner found no kernel are dropped.
    """
    merged = Merged(layout)
    shipped: list[tuple[Share, Row]] = []
    for role, table in tables:
        share = Share(role, table.path)
        merged.shares.append(share)
        for row in table.rows:
            if row.us is None:
                share.failed += 1
            elif gpu is not None and not _is_for(row.key, gpu):
                share.elsewhere += 1
            elif role == SHIPPED:
                shipped.append((share, row))
            else:
                _take(merged, share, row)
    for share, row in sorted(shipped, key=lambda pair: pair[1].us or 0.0):
        _take(merged, share, row)
    return merged


def tuned_of(merged: Merged, keys: Sequence[Key]) -> int:
    """The number of these GEMMs that aiter finds in the table, by their own M or by a padded M."""
    return sum(
        any(key._replace(m=m).looked_up(merged.layout) in merged.rows for m in (key.m, *padded(key.m, key.n)))
        for key in keys
    )


def padded(m: int, n: int) -> tuple[int, int]:
    """The two padded values of M that aiter also looks up: M rounded up to a multiple of a step, and to a power of two.

    The step grows with M. If M is above 8192 and N is above 4096, the power of two is 8192.
    """
    step = 16 if m <= 256 else 32 if m <= 1024 else 64 if m <= 4096 else 128
    return -(-m // step) * step, 8192 if m > 8192 and n > 4096 else 1 << (m - 1).bit_length()


def _is_for(key: Key, gpu: Gpu) -> bool:
    return key.units == gpu.units and key.gfx in (None, gpu.gfx)


def _take(merged: Merged, share: Share, row: Row) -> None:
    key = row.key.looked_up(merged.layout)
    if key in merged.rows:
        share.repeated += 1
    else:
        merged.rows[key] = row
        share.taken += 1


def _written(row: Row) -> dict[str, str]:
    """The row with its flags written as aiter compares them."""
    key = row.key
    return {
        **row.values,
        "gfx": key.gfx or "",
        "bias": str(key.bias),
        "scaleAB": str(key.scaled),
        "bpreshuffle": str(key.shuffled),
    }
