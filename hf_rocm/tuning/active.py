"""The table that aiter is given: the user's rows, then those tuned here, then those that it ships."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from hf_rocm import options
from hf_rocm.errors import TuningError
from hf_rocm.tuning import machine, store
from hf_rocm.tuning.machine import Gpu, Release
from hf_rocm.tuning.merge import SHIPPED, TUNED, YOURS, Merged, merge
from hf_rocm.tuning.table import Table, read


def before_import() -> None:
    """Merge the tables into one file and point aiter at it. Called right before aiter is imported.

    Without rows of the user's or of `hf-rocm tune` aiter is left as it is. Raises `TableError` if a file that the
    user named in AITER_CONFIG_GEMM_BF16 can't be used, by its lines; of ours, a warning.
    """
    named = options.tuned_files()
    if "aiter" in sys.modules or any(store.is_merged(path) and path.is_file() for path in named):
        return  # too late, or a process that started this one has done it
    release, gpu = machine.installed(), machine.gpu()
    if release is None or gpu is None or not release.layout.reads_variable:
        return
    if not named and not store.tuned(gpu, release).is_file():
        return
    merged = combined(gpu, release, named)
    path = store.merged(gpu, release, merged.digest)
    if not path.is_file():
        try:
            store.write(path, merged.text)
        except TuningError as error:
            warnings.warn(f"hf_rocm: tuned products are not used: {error}", RuntimeWarning, stacklevel=2)
            return
    options.use_tuned_table(path)


def combined(gpu: Gpu | None, release: Release, named: Sequence[Path], *, shipped: bool = True) -> Merged:
    """All that holds for this GPU (or for any, if it isn't known) with this release."""
    tables: list[tuple[str, Table]] = []
    for path in named:
        table = read(path, release.layout, release.version)
        _mend(table)
        table.refuse(release.version)
        tables.append((YOURS, table))
    if gpu is not None and store.tuned(gpu, release).is_file():
        tables += _if_right(TUNED, store.tuned(gpu, release), release)
    for path in release.shipped if shipped else []:
        tables += _if_right(SHIPPED, path, release)
    return merge(tables, release.layout, gpu)


def _mend(table: Table) -> None:
    """A missing gfx is filled in from the compute units, as far as they tell it."""
    if table.lacks_gfx:
        table.problems = [each for each in table.problems if not each.text.startswith("there is no column gfx")]


def _if_right(role: str, path: Path, release: Release) -> list[tuple[str, Table]]:
    """A file that nobody asked for by name: without its wrong lines, with a warning."""
    try:
        table = read(path, release.layout, release.version)
    except TuningError as error:
        warnings.warn(f"hf_rocm: a table of tuned products is left out: {error}", RuntimeWarning, stacklevel=3)
        return []
    if table.problems:
        line, text = table.problems[0]
        warnings.warn(
            f"hf_rocm: {len(table.problems) + table.more_problems} lines of {path} are left out; line {line}: {text}",
            RuntimeWarning,
            stacklevel=3,
        )
    return [(role, table)]
