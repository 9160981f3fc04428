"""The implementation of `hf-rocm tune list`, `check` and `merge`. It prints nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_rocm import options
from hf_rocm.errors import HfRocmError, TuningError
from hf_rocm.ops.aiter.tables import active, machine, store
from hf_rocm.ops.aiter.tables.machine import Gpu, Release
from hf_rocm.ops.aiter.tables.merge import SHIPPED, TUNED, YOURS, Share
from hf_rocm.ops.aiter.tables.table import Problem, Row, Table, read


@dataclass
class Checked:
    """The result of checking one file. error: the reason why it can't be read as a table."""

    path: Path
    rows: int = 0
    problems: list[Problem] = field(default_factory=list)
    more_problems: int = 0
    notes: list[str] = field(default_factory=list)
    error: HfRocmError | None = None

    @property
    def good(self) -> bool:
        return self.error is None and not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "good": self.good,
            "rows": self.rows,
            "problems": [problem._asdict() for problem in self.problems],
            "more_problems": self.more_problems,
            "notes": self.notes,
            "error": None if self.error is None else self.error.to_dict(),
        }


@dataclass(frozen=True)
class Listed:
    """One table of an inventory. holds_for: the GPU and the release, or only the release, that the table is for."""

    role: str
    holds_for: str
    rows: int
    path: Path

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "path": str(self.path)}


@dataclass
class Inventory:
    """All tables and recordings, for `tune list`."""

    machine: dict[str, str]
    tables: list[Listed] = field(default_factory=list)
    # Model, file.
    recordings: list[tuple[str, Path]] = field(default_factory=list)
    errors: list[HfRocmError] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "tables": [table.to_dict() for table in self.tables],
            "recordings": [{"model": name, "file": str(file)} for name, file in self.recordings],
            "errors": [error.to_dict() for error in self.errors],
        }


@dataclass(frozen=True)
class MergedFile:
    """The table that `merge` wrote."""

    path: Path
    rows: int
    holds_for: str
    shares: list[Share]

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "rows": self.rows,
            "holds_for": self.holds_for,
            "tables": [share.to_dict() for share in self.shares],
        }


def check(files: Sequence[Path], *, release: str | None, gpu: str | None) -> tuple[list[Checked], Release, Gpu | None]:
    """Check every file for this release of aiter and, if known, this GPU.

    Returns the results, the release and the GPU.
    """
    target, target_gpu = machine.release(release), machine.gpu(gpu)
    return [_checked(path, target, target_gpu) for path in files], target, target_gpu


def merge(
    files: Sequence[Path] | None, *, output: Path | None, shipped: bool, release: str | None, gpu: str | None
) -> MergedFile:
    """Merge tables into one. Never writes to an input file.

    Raises `TableError` if a file that the user named can't be read or has invalid lines, `OptionError` if gpu is not
    valid, and `TuningError` if the release is not supported, if there is nothing to merge, if output is None and no
    GPU is known, or if the output file is also an input, is inside the aiter package, or can't be written.
    """
    target, target_gpu = machine.release(release), machine.gpu(gpu)
    named = options.tuned_files() if files is None else list(files)
    if target_gpu is None and output is None:
        raise TuningError(
            "without an AMD GPU there is no default folder for the table",
            hint="specify the GPU (--gpu gfx942:304) or an output file (--output FILE)",
        )
    merged = active.combined(target_gpu, target, named, shipped=shipped)
    if not merged.shares:
        raise TuningError("there is nothing to merge", hint="specify files, or tune a model first: hf-rocm tune MODEL")
    if output is None:
        assert target_gpu is not None
        path = store.merged(target_gpu, target, merged.digest)
    else:
        path = output
        _check_output(path, [share.path for share in merged.shares] + options.tuned_files(), target)
    store.write(path, merged.text) if output is None else store.write_output(path, merged.text)
    holds_for = f"{target_gpu or 'any GPU'}, amd-aiter {target.version}"
    return MergedFile(path, len(merged.rows), holds_for, merged.shares)


def inventory() -> Inventory:
    """List all tables and recordings, with an error for every aiter table that can't be used."""
    release, gpu = machine.release(), machine.gpu()
    installed = release.folder is not None
    inventory = Inventory(
        {
            "GPU": str(gpu) if gpu else "this process has no AMD GPU under ROCm",
            "amd-aiter": release.version if installed else "not installed",
            "kept in": str(store.root()),
        }
    )
    for path in options.tuned_files():
        _list(inventory, YOURS, path, release, f"amd-aiter {release.version}")
    for path in store.tables():
        holds_for = " ".join(path.parts[-3:-1])
        if path.name == "tuned.csv":
            _list(inventory, TUNED, path, machine.release(path.parts[-2].removeprefix("amd-aiter-")), holds_for)
        else:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            rows = sum(not line.startswith("Validator,") for line in lines)
            inventory.tables.append(Listed("TunableOp", holds_for, rows, path))
    for path in release.shipped:
        _list(inventory, SHIPPED, path, release, f"amd-aiter {release.version}")
    for path in sorted(store.root().glob("shapes/*.json")):
        inventory.recordings.append((_model_of(path), path.with_suffix(".csv")))
    return inventory


def _checked(path: Path, release: Release, gpu: Gpu | None) -> Checked:
    try:
        table = read(path, release.layout, release.version)
    except HfRocmError as error:
        return Checked(path, error=error)
    checked = Checked(path, len(table.rows), table.problems, table.more_problems, list(table.notes))
    failed = [row.line for row in table.rows if row.us is None]
    if failed:
        checked.notes.append(f"{_lines(failed)}: the tuner found no kernel; left out when merged")
    if gpu is not None:
        _other_gpus(checked, table, gpu)
    return checked


def _other_gpus(checked: Checked, table: Table, gpu: Gpu) -> None:
    others: dict[tuple[str | None, int], list[Row]] = {}
    for row in table.rows:
        if row.key.units != gpu.units or row.key.gfx not in (None, gpu.gfx):
            others.setdefault((row.key.gfx, row.key.units), []).append(row)
    for (gfx, units), rows in others.items():
        name = f"{gfx}, {units} compute units" if gfx else f"a GPU with {units} compute units"
        checked.notes.append(f"{_lines([row.line for row in rows])}: for {name}, not for this one ({gpu})")
    if table.rows and sum(map(len, others.values())) == len(table.rows):
        checked.problems.append(Problem(table.rows[0].line, f"no row is for this GPU ({gpu})"))


def _lines(lines: Sequence[int]) -> str:
    if len(lines) == 1:
        return f"line {lines[0]}"
    return f"{len(lines)} rows from line {lines[0]} to line {lines[-1]}"


def _check_output(path: Path, sources: Sequence[Path], release: Release) -> None:
    for source in sources:
        try:
            same = path.exists() and path.samefile(source)
        except OSError:
            same = False
        if same:
            raise TuningError(f"{path} is also an input; choose another output file")
    if release.folder is not None and path.resolve().is_relative_to(release.folder.resolve()):
        raise TuningError(f"{path} is inside the aiter package, which is never modified")


def _list(inventory: Inventory, role: str, path: Path, release: Release, holds_for: str) -> None:
    try:
        table = read(path, release.layout, release.version)
        if role != SHIPPED:
            table.refuse(release.version)
        inventory.tables.append(Listed(role, holds_for, len(table.rows), path))
    except HfRocmError as error:
        inventory.errors.append(error)


def _model_of(path: Path) -> str:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return "an unknown model"
