"""The table of tuned GEMMs that aiter reads: the user's rows, then those tuned here, then those that aiter ships."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from hf_rocm import files, options
from hf_rocm.errors import TuningError
from hf_rocm.ops.aiter.tables import machine, store
from hf_rocm.ops.aiter.tables.machine import Gpu, Release
from hf_rocm.ops.aiter.tables.merge import SHIPPED, TUNED, YOURS, Merged, merge
from hf_rocm.ops.aiter.tables.table import Table, read


def before_import() -> None:
    """Merge the tables into one file and set it as aiter's table. Called right before aiter is imported.

    Changes nothing without an AMD GPU, if the user named no table and `hf-rocm tune` has written none, or if this
    release does not read AITER_CONFIG_GEMM_BF16 or has tables that hf_rocm does not support. Raises `TableError`, with
    the lines, if a file that the user named in this variable can't be used. Warns about unusable files that the user
    did not name, about invalid lines in them, and if the merged file can't be written.
    """
    named = options.tuned_files()
    if "aiter" in sys.modules or any(store.is_merged(path) for path in named):
        # aiter is already imported, or the parent process has set the table.
        return
    try:
        release = machine.installed()
    except TuningError:
        # Nothing can have been tuned here for an unsupported release; aiter reads its own table.
        return
    gpu = machine.gpu()
    if release is None or gpu is None or not release.layout.reads_variable:
        return
    if not named and _tuned(gpu, release) is None:
        return
    merged = combined(gpu, release, named)
    try:
        path = store.merged(gpu, release, merged.digest)
        written = files.read_own(path)
        # Another process may have written the file.
        if written is None or written[0] != merged.text:
            store.write(path, merged.text)
    except TuningError as error:
        warnings.warn(f"hf_rocm: tuned GEMMs are not used: {error}", RuntimeWarning, stacklevel=2)
        return
    options.use_tuned_table(path)


def combined(gpu: Gpu | None, release: Release, named: Sequence[Path], *, shipped: bool = True) -> Merged:
    """Merge the rows that apply to this release and this GPU (or to any GPU, if gpu is None).

    named: the user's tables. shipped: whether to include the tables that aiter ships. Raises `TableError` if one of the
    user's tables can't be used.
    """
    tables: list[tuple[str, Table]] = []
    for path in named:
        table = read(path, release.layout, release.version)
        _accept_missing_gfx(table)
        table.refuse(release.version)
        tables.append((YOURS, table))
    tuned = None if gpu is None else _tuned(gpu, release)
    if tuned is not None:
        tables += _read_optional(TUNED, tuned, release)
    for path in release.shipped if shipped else []:
        tables += _read_optional(SHIPPED, path, release)
    return merge(tables, release.layout, gpu)


def _tuned(gpu: Gpu, release: Release) -> Path | None:
    """The table of `hf-rocm tune`, or None if it does not exist or this user has no cache folder."""
    try:
        path = store.tuned(gpu, release)
    except TuningError:
        return None
    return path if files.is_file(path) else None


def _accept_missing_gfx(table: Table) -> None:
    """Accept a table without the column gfx. A row remains a problem if its compute units do not determine gfx."""
    if table.lacks_gfx:
        table.problems = [problem for problem in table.problems if "there is no column gfx" not in problem.text]


def _read_optional(role: str, path: Path, release: Release) -> list[tuple[str, Table]]:
    """Read a file that the user did not name. An unusable file and invalid lines are ignored with a warning."""
    try:
        table = read(path, release.layout, release.version)
    except TuningError as error:
        warnings.warn(f"hf_rocm: a table of tuned GEMMs is ignored: {error}", RuntimeWarning, stacklevel=3)
        return []
    if table.problems:
        line, text = table.problems[0]
        warnings.warn(
            f"hf_rocm: ignored {len(table.problems) + table.more_problems} of the lines of {path}; line {line}: {text}",
            RuntimeWarning,
            stacklevel=3,
        )
    return [(role, table)]
