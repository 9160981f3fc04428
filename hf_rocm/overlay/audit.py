"""Compare the whole transformers package with the record of its package manager, to find files that are not stock.

pip and uv do not check files after installing them. A changed file that is hard-linked was written in place (for
instance, by `cp -r`), so the same bytes are in the package manager's cache and in every environment that shares the
file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hf_rocm.errors import OverlayError
from hf_rocm.overlay import block
from hf_rocm.overlay.catalog import Catalog
from hf_rocm.overlay.locate import Installation, recorded_hex
from hf_rocm.overlay.scan import read_file
from hf_rocm.overlay.state import Installed, of_block

Progress = Callable[[int, int], None]


class Finding(str, Enum):
    """How a file differs from the record."""

    # The recorded bytes followed by the block, as installed.
    OVERLAY = "overlay"
    # The recorded bytes followed by an intact block of another release of hf-rocm, or of another overlay.
    OLD = "old"
    # Bytes other than the recorded ones.
    CHANGED = "changed"
    MISSING = "missing"
    # Not in the record.
    ADDED = "added"


@dataclass(frozen=True)
class Entry:
    """One file that differs from the record.

    shared: whether the file is a symbolic link or has other hard links; False for missing and added files.
    """

    path: Path
    finding: Finding
    shared: bool = False

    def to_dict(self) -> dict[str, object]:
        return {"file": str(self.path), "finding": self.finding.value, "shared": self.shared}


@dataclass(frozen=True)
class Audit:
    """The result: the number of compared files, and the files that are not stock."""

    installation: Installation
    compared: int
    entries: tuple[Entry, ...]

    @property
    def foreign(self) -> tuple[Entry, ...]:
        """Return the entries that are neither stock nor written by the installed hf-rocm."""
        return tuple(entry for entry in self.entries if entry.finding is not Finding.OVERLAY)

    @property
    def warning(self) -> OverlayError | None:
        """Return an error about shared files that were changed in place, with the fix, or None."""
        poisoned = [entry.path for entry in self.entries if entry.finding is Finding.CHANGED and entry.shared]
        if not poisoned:
            return None
        release = self.installation.version
        rest = f" (and {len(poisoned) - 1} more)" if len(poisoned) > 1 else ""
        return OverlayError(
            "files of transformers that are shared with a cache or other environments were changed in place",
            facts={
                "file": f"{poisoned[0]}{rest}",
                "expected": "the bytes that the package manager recorded",
                "found": "other bytes, in every environment that shares the file: it was overwritten in place",
                "places": f"find / -xdev -samefile '{poisoned[0]}'",
            },
            hint="clean the cache (uv cache clean transformers; conda clean --packages), then, in every environment "
            f"that shares the file: uv pip install --reinstall --no-deps transformers=={release}",
        )

    def to_dict(self) -> dict[str, object]:
        return {
            "compared": self.compared,
            "entries": [entry.to_dict() for entry in self.entries],
            "warning": self.warning.to_dict() if self.warning else None,
        }


def audit(installation: Installation, catalog: Catalog, *, progress: Progress | None = None) -> Audit:
    """Compare every file of the package with RECORD.

    progress: a function that is called with the number of compared files and the total. A block counts as hf-rocm's
    only if `status` accepts its code. Raises `OverlayError` if the package manager left no record.
    """
    base, package = installation.root.parent, installation.root.name
    recorded = {path: value for path, value in installation.record.items() if path.startswith(f"{package}/")}
    if not recorded:
        raise OverlayError(
            "the package manager left no record of transformers' files",
            facts={
                "path": installation.root,
                "expected": f"{base}/transformers-{installation.version}.dist-info/RECORD",
                "found": installation.metadata or "nothing",
            },
            hint="install transformers with pip or uv; `hf-rocm status` needs no record",
        )
    entries = []
    for number, (path, encoded) in enumerate(sorted(recorded.items()), 1):
        entry = _compare(installation, catalog, base / path, recorded_hex(encoded))
        if entry is not None:
            entries.append(entry)
        if progress is not None:
            progress(number, len(recorded))
    entries += [Entry(file, Finding.ADDED) for file in _files(installation.root) if _key(file, base) not in recorded]
    return Audit(installation, len(recorded), tuple(entries))


def _compare(installation: Installation, catalog: Catalog, file: Path, expected: str) -> Entry | None:
    data = read_file(file)
    if data is None:
        return Entry(file, Finding.MISSING)
    if block.sha256(data) == expected:
        return None
    status = file.lstat()
    shared = status.st_nlink > 1 or stat.S_ISLNK(status.st_mode)
    return Entry(file, _finding(installation, catalog, file, data, expected), shared)


def _finding(installation: Installation, catalog: Catalog, file: Path, data: bytes, expected: str) -> Finding:
    model = file.parent.name
    overlay = catalog.find(model, installation.version)
    if file != installation.root / "models" / model / f"modeling_{model}.py":
        overlay = None
    installed, parts, _ = of_block(data, overlay, catalog.by_id)
    if parts is None or block.sha256(parts.stock) != expected:
        return Finding.CHANGED
    return {Installed.YES: Finding.OVERLAY, Installed.OLD: Finding.OLD}.get(installed, Finding.CHANGED)


def _files(root: Path) -> list[Path]:
    """Every file of the package except compiled bytecode."""
    files = []
    for place, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        files += [Path(place) / name for name in sorted(names) if not name.endswith(".pyc")]
    return files


def _key(file: Path, base: Path) -> str:
    return file.relative_to(base).as_posix()
