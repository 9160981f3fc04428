"""Tuning with aiter: its untuned table is written, its own tuner is run on it, and what it found is kept.

The tuner runs for minutes to hours and may be stopped: every row that it has written by then is kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_rocm import options
from hf_rocm.errors import TuningError
from hf_rocm.tuning import shapes as shape_files
from hf_rocm.tuning import store
from hf_rocm.tuning.machine import Gpu, Release
from hf_rocm.tuning.merge import TUNED, Merged, merge
from hf_rocm.tuning.shapes import Gemm
from hf_rocm.tuning.table import Key, Table, read

Progress = Callable[[int, int], None]

PATIENCE = 3  # failed attempts without a new row in between; the tuners up to 0.1.15 would make thirty
_GRACE = 30.0  # seconds to end in after an interrupt
_ATTEMPT_FAILED = "process exitcode is"


@dataclass(frozen=True)
class Outcome:
    """What a run of the tuner came to. missing: shapes for which it found nothing, or that it didn't get to."""

    tuned: int
    missing: list[Gemm]
    code: int
    table: Path
    log: Path

    def to_dict(self) -> dict[str, Any]:
        return {
            "tuned": self.tuned,
            "missing": [each._asdict() for each in self.missing],
            "table": str(self.table),
            "log": str(self.log),
        }


def takes(shape: Gemm) -> bool:
    """Whether hf_rocm would give this product to aiter's `gemm_a16w16` at all."""
    return shape.dtype in ("torch.bfloat16", "torch.float16") and shape.k % 8 == 0


def command(release: Release, untuned: Path | str, tuned: Path | str) -> list[str]:
    """The command line of this release's tuner. A release that was only named has it below aiter's sources."""
    script = release.tuner or Path(release.layout.tuner)
    files = ["--input_file", str(untuned), "--tuned_file", str(tuned)]
    return [sys.executable if release.tuner else "python3", str(script), *files, *release.layout.options]


def known(gpu: Gpu, release: Release) -> set[Key]:
    """What is in the table of what was tuned here. Raises `TableError` if somebody damaged it."""
    if not store.tuned(gpu, release).is_file():
        return set()
    return {row.key._replace(gfx=gpu.gfx) for row in _kept(gpu, release).rows}


def tune(shapes: Sequence[Gemm], gpu: Gpu, release: Release, *, progress: Progress | None = None) -> Outcome:
    """Run the tuner on these shapes and keep what it found. On an interrupt too, which is then raised again.

    Raises `TuningError` if the installed aiter has no tuner, or if that fails on everything.
    """
    if release.tuner is None:
        raise TuningError(
            f"amd-aiter {release.version} is installed without its tuner",
            facts={"expected": release.layout.tuner, "below": release.folder or "(not installed)"},
            hint="install it from source: git clone --recursive https://github.com/ROCm/aiter",
        )
    run = _new_folder(store.folder(gpu, release) / "runs")
    untuned, tuned, log = run / "untuned.csv", run / "tuned.csv", run / "log.txt"
    store.write(untuned, shape_files.write(shapes, release.layout))
    try:
        code = _run(command(release, untuned, tuned), run, tuned, log, len(shapes), progress)
    finally:
        found = _keep(tuned, gpu, release)
    missing = [each for each in shapes if each.key(gpu.gfx, gpu.units) not in found]
    if len(missing) == len(shapes):
        raise TuningError(
            "aiter's tuner found nothing",
            facts={"exit code": code, "it said": _tail(log), "all of it": log},
            hint="this is the release's own tuner; see its log",
        )
    return Outcome(len(shapes) - len(missing), missing, code, store.tuned(gpu, release), log)


def _run(line: list[str], folder: Path, tuned: Path, log: Path, total: int, progress: Progress | None) -> int:
    """Run the tuner in a process group of its own, so that it ends with all its workers."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            line,
            cwd=folder,
            env=options.without_tables(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        done, failures = 0, 0
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(timeout=0.5)
                now = min(total, _rows(tuned))
                said = log.read_bytes().count(_ATTEMPT_FAILED.encode())
                if now > done:
                    done, failures = now, said
                if said - failures >= PATIENCE:
                    return _end(process)
                if progress:
                    progress(done, total)
        except BaseException:
            _end(process)
            raise


def _new_folder(parent: Path) -> Path:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=parent))
    except OSError as error:
        raise TuningError(
            "there is no place for the tuner's files",
            facts={"folder": parent, "the system says": error.strerror},
            hint="name a folder of yours as HF_ROCM_CACHE",
        ) from error


def _end(process: subprocess.Popen[bytes]) -> int:
    for number, patience in ((signal.SIGINT, _GRACE), (signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            return process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("a killed process ends")


def _keep(tuned: Path, gpu: Gpu, release: Release) -> set[Key]:
    """Put the new rows before those of earlier runs; what was found, by its full key."""
    if not tuned.is_file():
        return set()
    new = read(tuned, release.layout, release.version)
    store.folder(gpu, release).mkdir(parents=True, exist_ok=True)
    with (store.folder(gpu, release) / ".lock").open("w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: two tunings at once are rare
            fcntl.flock(lock, fcntl.LOCK_EX)
        tables = [(TUNED, new)]
        if store.tuned(gpu, release).is_file():
            tables.append((TUNED, _kept(gpu, release)))
        merged: Merged = merge(tables, release.layout, gpu)
        store.write(store.tuned(gpu, release), merged.text)
    return {row.key._replace(gfx=gpu.gfx) for row in new.rows if row.us is not None and row.key.units == gpu.units}


def _kept(gpu: Gpu, release: Release) -> Table:
    table = read(store.tuned(gpu, release), release.layout, release.version)
    table.refuse(release.version)
    return table


def _rows(path: Path) -> int:
    try:
        return max(0, path.read_bytes().count(b"\n") - 1)
    except OSError:
        return 0


def _tail(log: Path) -> str:
    """The last line that says something."""
    lines = log.read_bytes()[-4000:].decode("utf-8", "replace").splitlines() if log.is_file() else []
    words = [" ".join(each.split()) for each in lines if each.strip() and "retried num" not in each]
    return words[-1][:300] if words else "nothing"
