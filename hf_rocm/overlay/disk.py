"""The file operations of the installer, one method per operation, so that a test can make any of them fail."""

from __future__ import annotations

import os
from pathlib import Path

from hf_rocm.overlay.scan import read_file


class Disk:
    """The real file system."""

    def read(self, path: Path) -> bytes | None:
        return read_file(path)

    def stat(self, path: Path) -> os.stat_result:
        return path.lstat()

    def list(self, directory: Path) -> list[str]:
        try:
            return sorted(os.listdir(directory))  # noqa: PTH208 (names, not paths)
        except FileNotFoundError:
            return []

    def create(self, path: Path) -> int:
        """Create a new file that only the current user can open."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def write(self, descriptor: int, data: bytes) -> int:
        return os.write(descriptor, data)

    def own(self, descriptor: int, user: int, group: int) -> None:
        os.fchown(descriptor, user, group)

    def mode(self, descriptor: int, mode: int) -> None:
        os.fchmod(descriptor, mode)

    def touch(self, descriptor: int, seconds: int) -> None:
        """Set the timestamps of an open file."""
        os.utime(descriptor, (seconds, seconds))

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)  # noqa: PTH105 (the system call)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def open_directory(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
