"""The whole transformers package against the record of its package manager: what else is not stock here?

pip and uv check nothing after installing. A file that differs and is hard-linked was written in place (`cp -r` does
that): the same bytes are in the package manager's cache and in every environment that was made from it.
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
from hf_rocm.overlay.locate import Installation, recorded_hex
from hf_rocm.overlay.survey import read_file

Progress = Callable[[int, int], None]


class Finding(str, Enum):
    """What is the matter with one file."""

    OVERLAY = "overlay"  # the recorded bytes, and our block below them: what installing leaves
    CHANGED = "changed"  # other bytes than the record says
    MISSING = "missing"
    ADDED = "added"  # not in the record


@dataclass(frozen=True)
class Entry:
    """One file that is not as recorded. shared: it has other names, so its bytes are in other places as well."""

    path: Path
    finding: Finding
    shared: bool = False

    def to_dict(self) -> dict[str, object]:
        return {"file": str(self.path), "finding": self.finding.value, "shared": self.shared}


@dataclass(frozen=True)
class Audit:
    """The outcome: how many files were compared, and those that are not stock."""

    installation: Installation
    compared: int
    entries: tuple[Entry, ...]

    @property
    def foreign(self) -> tuple[Entry, ...]:
        """What is neither stock nor ours."""
        return tuple(entry for entry in self.entries if entry.finding is not Finding.OVERLAY)

    @property
    def warning(self) -> OverlayError | None:
        """What to do about files that were changed in place and are shared, if there are any."""
        poisoned = [entry.path for entry in self.entries if entry.finding is Finding.CHANGED and entry.shared]
        if not poisoned:
            return None
        release = self.installation.version
        rest = f" (and {len(poisoned) - 1} more)" if len(poisoned) > 1 else ""
        return OverlayError(
            "files of transformers were changed in place while they are shared with a cache and other environments",
            facts={
                "file": f"{poisoned[0]}{rest}",
                "expected": "the bytes that the package manager recorded",
                "found": "others, in every place that shares the file: someone copied onto it",
                "places": f"find / -xdev -samefile '{poisoned[0]}'",
            },
            hint="clean the cache (uv cache clean transformers; conda clean --packages), then, in every environment "
            f"that shares it: uv pip install --reinstall --no-deps transformers=={release}",
        )

    def to_dict(self) -> dict[str, object]:
        return {
            "compared": self.compared,
            "entries": [entry.to_dict() for entry in self.entries],
            "warning": self.warning.to_dict() if self.warning else None,
        }


def audit(installation: Installation, *, progress: Progress | None = None) -> Audit:
    """Compare every file of the package with RECORD; progress is told how many of how many are done.

    Raises `OverlayError` if the package manager left no record.
    """
    base, package = installation.root.parent, installation.root.name
    recorded = {path: value for path, value in installation.record.items() if path.startswith(f"{package}/")}
    if not recorded:
        raise OverlayError(
            "there is no record of what transformers was delivered with",
            facts={
                "path": installation.root,
                "expected": f"{base}/transformers-{installation.version}.dist-info/RECORD",
                "found": installation.metadata or "nothing",
            },
            hint="install transformers with pip or uv; `hf-rocm status` does without a record",
        )
    entries = []
    for number, (path, encoded) in enumerate(sorted(recorded.items()), 1):
        entry = _compare(base / path, recorded_hex(encoded))
        if entry is not None:
            entries.append(entry)
        if progress is not None:
            progress(number, len(recorded))
    entries += [Entry(file, Finding.ADDED) for file in _files(installation.root) if _key(file, base) not in recorded]
    return Audit(installation, len(recorded), tuple(entries))


def _compare(file: Path, expected: str) -> Entry | None:
    data = read_file(file)
    if data is None:
        return Entry(file, Finding.MISSING)
    if block.sha256(data) == expected:
        return None
    status = file.lstat()
    shared = status.st_nlink > 1 or stat.S_ISLNK(status.st_mode)
    return Entry(file, Finding.OVERLAY if _ours(data, expected) else Finding.CHANGED, shared)


def _ours(data: bytes, expected: str) -> bool:
    try:
        parts = block.split(data)
    except OverlayError:
        return False
    return parts is not None and block.sha256(parts.stock) == expected


def _files(root: Path) -> list[Path]:
    """Every file of the package but what Python compiled."""
    found = []
    for place, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        found += [Path(place) / name for name in sorted(names) if not name.endswith(".pyc")]
    return found


def _key(file: Path, base: Path) -> str:
    return file.relative_to(base).as_posix()
