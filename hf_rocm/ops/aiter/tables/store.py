"""The tuning files in the user's cache folder: aiter's tables and PyTorch's TunableOp results by GPU and release, and
recorded GEMMs by model.

Files are written atomically.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_rocm import files, options
from hf_rocm.errors import TuningError
from hf_rocm.ops.aiter.tables.machine import Gpu, Release

_MERGED = "merged-"


def root() -> Path:
    """The folder of all tuning files. Raises `TuningError` for a user without a home folder."""
    try:
        return options.cache_folder() / "tuning"
    except OSError as error:
        raise TuningError(
            "there is no cache folder for tuned GEMMs",
            facts={"system error": error.strerror or error},
            hint="set HF_ROCM_CACHE to a writable folder",
        ) from error


def folder(gpu: Gpu, release: Release) -> Path:
    """The folder for this GPU and this release."""
    return root() / gpu.folder / f"amd-aiter-{release.version}"


def tuned(gpu: Gpu, release: Release) -> Path:
    """The table that `hf-rocm tune` writes."""
    return folder(gpu, release) / "tuned.csv"


def merged(gpu: Gpu, release: Release, digest: str) -> Path:
    """The table passed to aiter. It is named after its content, so that it never changes while it is read."""
    return folder(gpu, release) / f"{_MERGED}{digest}.csv"


def is_merged(path: Path) -> bool:
    """Whether a path is a merged table in this cache, such as one that a parent process has written."""
    if not path.name.startswith(_MERGED) or path.suffix != ".csv":
        return False
    try:
        return path.is_relative_to(root()) and files.read_own(path) is not None
    except TuningError:
        return False


def shapes(fingerprint: str) -> Path:
    """The recorded GEMMs of a model with this fingerprint."""
    return root() / "shapes" / f"{hashlib.sha256(fingerprint.encode()).hexdigest()[:24]}.csv"


def tunable(gfx: str, torch_version: str, rocm: str) -> Path:
    """PyTorch's TunableOp results; PyTorch itself checks that its libraries match the file."""
    return root() / gfx / f"torch-{torch_version}-rocm-{rocm}" / "tunableop.csv"


def tables() -> Iterator[Path]:
    """Every table of `hf-rocm tune` and every TunableOp file in the cache, for all GPUs and releases."""
    yield from sorted(root().glob("*/amd-aiter-*/tuned.csv"))
    yield from sorted(root().glob("*/torch-*/tunableop*.csv"))


def write(path: Path, text: str) -> None:
    """Write a file of the cache atomically, writable only by this user. Raises `TuningError` on failure."""
    with _errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_own(path, text)


def write_output(path: Path, text: str) -> None:
    """Write a file that the user named (see `files.output`). Raises `TuningError` if it can't be written."""
    with _errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_output(path, text)


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise TuningError(
            f"{path.name or path} can't be written",
            facts={"path": path, "system error": getattr(error, "strerror", None) or error},
            hint="specify another folder, or set HF_ROCM_CACHE to a writable folder",
        ) from error


def record_name(fingerprint: str, name: str) -> None:
    """Record the name of the model next to its shapes, for `hf-rocm tune list`."""
    write(shapes(fingerprint).with_suffix(".json"), json.dumps({"model": name, "fingerprint": fingerprint}) + "\n")
