"""Tuning with aiter: write a table of untuned shapes, run aiter's tuner, and save the results.

The tuner runs for minutes or hours. If it is interrupted, the rows that it has already written are saved.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hf_rocm import files, options
from hf_rocm.errors import TuningError
from hf_rocm.ops.aiter.tables import store
from hf_rocm.ops.aiter.tables.machine import Gpu, Release
from hf_rocm.ops.aiter.tables.merge import TUNED, Merged, merge
from hf_rocm.ops.aiter.tables.table import Key, Table, read
from hf_rocm.tools.tuning import shapes as shape_files
from hf_rocm.tools.tuning.shapes import Gemm

Progress = Callable[[int, int], None]

# The tuner is stopped after this many failed attempts without a new row. Without this limit, the tuner of aiter 0.1.15
# and earlier releases would make 30 attempts.
PATIENCE = 3
# Seconds that the tuner is given to exit after an interrupt, and the longest wait for the lock on the results.
_GRACE = 30.0
_ATTEMPT_FAILED = "process exitcode is"


@dataclass(frozen=True)
class Outcome:
    """The result of a tuner run. missing: shapes without a kernel, and shapes that the tuner did not reach."""

    tuned: int
    missing: list[Gemm]
    code: int
    table: Path
    log: Path

    def to_dict(self) -> dict[str, Any]:
        return {
            "tuned": self.tuned,
            "missing": [shape._asdict() for shape in self.missing],
            "table": str(self.table),
            "log": str(self.log),
        }


def supports(shape: Gemm) -> bool:
    """Return whether hf_rocm may call aiter's `gemm_a16w16` for this GEMM."""
    return shape.dtype in ("torch.bfloat16", "torch.float16") and shape.k % 8 == 0


def command(release: Release, untuned: Path | str, tuned: Path | str) -> list[str]:
    """Return the command line of a release's tuner, with a path in aiter's sources if the tuner isn't installed."""
    script = release.tuner or Path(release.layout.tuner)
    files = ["--input_file", str(untuned), "--tuned_file", str(tuned)]
    return [sys.executable if release.tuner else "python3", str(script), *files, *release.layout.options]


def known(gpu: Gpu, release: Release) -> set[Key]:
    """Return the keys in the table of earlier results, if any. Raises `TableError` if the table is corrupt."""
    if not store.tuned(gpu, release).is_file():
        return set()
    return {row.key._replace(gfx=gpu.gfx) for row in _kept(gpu, release).rows}


def tune(shapes: Sequence[Gemm], gpu: Gpu, release: Release, *, progress: Progress | None = None) -> Outcome:
    """Run the tuner on these shapes and save the results, even after an interrupt, which is re-raised.

    Raises `TuningError` if the installed aiter has no tuner, if the tuner's files can't be written, or if the tuner
    fails on every shape, and `TableError` if its results or those of earlier runs can't be read.
    """
    if release.tuner is None:
        raise TuningError(
            f"amd-aiter {release.version} is installed without its tuner",
            facts={"expected": release.layout.tuner, "in": release.folder or "(not installed)"},
            hint="install it from source: git clone --recursive https://github.com/ROCm/aiter",
        )
    run = _new_folder(store.folder(gpu, release) / "runs")
    untuned, tuned, log = run / "untuned.csv", run / "tuned.csv", run / "log.txt"
    store.write(untuned, shape_files.write(shapes, release.layout))
    try:
        code = _run(command(release, untuned, tuned), run, tuned, log, len(shapes), progress)
    finally:
        saved = _keep(tuned, gpu, release)
    missing = [shape for shape in shapes if shape.key(gpu.gfx, gpu.units) not in saved]
    if len(missing) == len(shapes):
        raise TuningError(
            "aiter's tuner returned no kernel",
            facts={"exit code": code, "last line": _tail(log), "log": log},
            hint="see the tuner's log for the reason",
        )
    return Outcome(len(shapes) - len(missing), missing, code, store.tuned(gpu, release), log)


def _run(line: list[str], folder: Path, tuned: Path, log: Path, total: int, progress: Progress | None) -> int:
    """Run the tuner in its own process group, so that all its workers are stopped with it. Returns its exit code."""
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
                rows = min(total, _rows(tuned))
                attempts = log.read_bytes().count(_ATTEMPT_FAILED.encode())
                if rows > done:
                    done, failures = rows, attempts
                if attempts - failures >= PATIENCE:
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
            "the tuner's files cannot be written",
            facts={"folder": parent, "system error": error.strerror},
            hint="set HF_ROCM_CACHE to a writable folder",
        ) from error


def _end(process: subprocess.Popen[bytes]) -> int:
    for number, patience in ((signal.SIGINT, _GRACE), (signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            return process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("unreachable: the wait for a killed process has no timeout")


def _keep(tuned: Path, gpu: Gpu, release: Release) -> set[Key]:
    """Save the new rows together with those of earlier runs, over which the new rows take precedence.

    Returns the keys, with the architecture, of the new rows that have a time and the GPU's number of compute units.
    """
    if not tuned.is_file():
        return set()
    new = read(tuned, release.layout, release.version)
    store.folder(gpu, release).mkdir(parents=True, exist_ok=True)
    with (store.folder(gpu, release) / ".lock").open("w") as lock:
        # The file system may not support locks; concurrent tuning is rare.
        with contextlib.suppress(OSError):
            files.poll(partial(_lock, lock.fileno()), timeout=_GRACE)
        tables = [(TUNED, new)]
        if store.tuned(gpu, release).is_file():
            tables.append((TUNED, _kept(gpu, release)))
        merged: Merged = merge(tables, release.layout, gpu)
        store.write(store.tuned(gpu, release), merged.text)
    return {row.key._replace(gfx=gpu.gfx) for row in new.rows if row.us is not None and row.key.units == gpu.units}


def _lock(descriptor: int) -> bool | None:
    return files.lock(descriptor) or None


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
    """Return the last line of a log that is neither empty nor about a retry, truncated to 300 characters."""
    lines = log.read_bytes()[-4000:].decode("utf-8", "replace").splitlines() if log.is_file() else []
    words = [" ".join(line.split()) for line in lines if line.strip() and "retried num" not in line]
    return words[-1][:300] if words else "nothing"
