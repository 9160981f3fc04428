"""The files of an installed package on disk, for checks that every byte was restored."""

from __future__ import annotations

import base64
import csv
import hashlib
import stat
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Tree:
    """A package's files: path → (mode, sha256). Compiled modules are excluded, because Python may write them at any
    time.
    """

    files: dict[str, tuple[int, str]]

    @property
    def digest(self) -> str:
        """One hash of all paths, modes and contents."""
        lines = (f"{path}\0{mode:o}\0{content}\n" for path, (mode, content) in sorted(self.files.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def differing(self, other: Tree) -> list[str]:
        paths = self.files.keys() | other.files.keys()
        return sorted(path for path in paths if self.files.get(path) != other.files.get(path))


def read(folder: Path) -> Tree:
    files = {}
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            files[str(path.relative_to(folder))] = (stat.S_IMODE(path.stat().st_mode), content)
    return Tree(files)


def differing_from_record(site_packages: Path, package: str) -> tuple[int, list[str]]:
    """The number of files that the wheel's RECORD lists for a package, and the files that differ from it."""
    (record,) = site_packages.glob(f"{package}-*.dist-info/RECORD")
    listed, wrong = 0, []
    with record.open(newline="") as lines:
        for name, expected, _ in csv.reader(lines):
            if not name.startswith(f"{package}/") or not expected.startswith("sha256="):
                continue
            listed += 1
            path = site_packages / name
            digest = hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b""
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != expected.removeprefix("sha256="):
                wrong.append(name)
    return listed, wrong
