"""Locks that allow one writer at a time: a lock on the package's folder, and uv's own lock on the environment."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hf_rocm import files
from hf_rocm.errors import OverlayError
from hf_rocm.overlay.pid_lock import claimed

CLAIM = ".hf-rocm-claim"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL)


@contextmanager
def exclusive(root: Path, *, timeout: float = 60.0) -> Iterator[list[str]]:
    """Hold the locks of the transformers at `root` within the block. Yields notices for the user.

    The folder itself is locked, so no lock file is left in it. Waits up to `timeout` seconds for each lock, then raises
    `OverlayError`. The system releases a lock when its process ends, so no lock is ever stale. On a file system without
    locks, a claim (`pid_lock`) replaces the lock.
    """
    notices: list[str] = []
    with ExitStack() as stack:
        environment = _uv_lock(root)
        if environment is not None:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            stack.enter_context(_locked(environment, flags, timeout, notices))
        stack.enter_context(_locked(root, os.O_RDONLY | os.O_DIRECTORY, timeout, notices))
        yield notices


def _uv_lock(root: Path) -> Path | None:
    """Return the `.lock` file of `root`'s virtual environment if it exists or uv created the environment, else None."""
    for folder in root.parents:
        settings = folder / "pyvenv.cfg"
        if settings.is_file():
            lock = folder / ".lock"
            made_by_uv = any(line.split("=")[0].strip() == "uv" for line in settings.read_text().splitlines())
            return lock if made_by_uv or lock.is_file() else None
    return None


@contextmanager
def _locked(path: Path, flags: int, timeout: float, notices: list[str]) -> Iterator[None]:
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        # for example, another user owns the lock file; the lock on the folder still excludes other installers
        notices.append(f"{path} can't be locked ({error.strerror}); do not run uv on this environment in the meantime")
        yield
        return
    stack = ExitStack()
    try:
        locked = files.poll(lambda: _lock(descriptor), timeout=timeout)
        if locked is None:
            raise OverlayError(
                "another installer is running in this environment",
                facts={"file": path, "expected": f"the lock within {timeout:g} s", "found": "another process has it"},
                hint="wait for it to finish, then run the command again",
            )
        if not locked:
            claim = path.parent / f".{path.name.lstrip('.')}{CLAIM}"
            notices.append(f"{path} is on a file system without locks; {claim.name} next to it is used instead")
            stack.enter_context(claimed(claim, timeout=timeout))
        yield
    finally:
        stack.close()
        # An error from close must not replace the result of the block; the lock is released in any case.
        with suppress(OSError):
            os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Return True if locked, None if another process has the lock, False if the file system does not support locks."""
    try:
        return files.lock(descriptor) or None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
