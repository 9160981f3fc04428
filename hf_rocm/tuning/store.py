"""Where tuning is kept: in the user's cache, by GPU and release of aiter. Files are put in place whole."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hf_rocm import options
from hf_rocm.errors import TuningError
from hf_rocm.tuning.machine import Gpu, Release

_MERGED = "merged-"


def root() -> Path:
    return options.cache_folder() / "tuning"


def folder(gpu: Gpu, release: Release) -> Path:
    """Everything that was found for this GPU with this release."""
    return root() / gpu.folder / f"amd-aiter-{release.version}"


def tuned(gpu: Gpu, release: Release) -> Path:
    """The table of what `hf-rocm tune` found."""
    return folder(gpu, release) / "tuned.csv"


def merged(gpu: Gpu, release: Release, digest: str) -> Path:
    """The table that aiter is given. It is named by its content, so that it never changes under a reader."""
    return folder(gpu, release) / f"{_MERGED}{digest}.csv"


def is_merged(path: Path) -> bool:
    """Whether a path is a table of ours that an enclosing process has merged."""
    return path.name.startswith(_MERGED) and path.suffix == ".csv" and path.is_relative_to(root())


def shapes(fingerprint: str) -> Path:
    """The products that a model of this fingerprint was seen to run."""
    return root() / "shapes" / f"{hashlib.sha256(fingerprint.encode()).hexdigest()[:24]}.csv"


def tunable(gfx: str, torch_version: str, rocm: str) -> Path:
    """PyTorch's TunableOp results; it checks by itself that its libraries are those of the file."""
    return root() / gfx / f"torch-{torch_version}-rocm-{rocm}" / "tunableop.csv"


def tables() -> Iterator[Path]:
    """Every table of `hf-rocm tune` in the cache, for all GPUs and releases."""
    yield from sorted(root().glob("*/amd-aiter-*/tuned.csv"))
    yield from sorted(root().glob("*/torch-*/tunableop*.csv"))


def write(path: Path, text: str) -> None:
    """Put a file in place whole. Raises `TuningError` where that can't be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
            Path(name).chmod(0o666 & ~_umask())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:
        raise TuningError(
            f"{path.name or path} can't be written",
            facts={"path": path, "the system says": getattr(error, "strerror", None) or error},
            hint="name another place, or a folder of yours as HF_ROCM_CACHE",
        ) from error


def remember_name(fingerprint: str, name: str) -> None:
    """Beside the shapes, whose they are, for `hf-rocm tune list`."""
    write(shapes(fingerprint).with_suffix(".json"), json.dumps({"model": name, "fingerprint": fingerprint}) + "\n")


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
