"""One writer at a time: a lock on the package's folder, and the one that uv takes on its environment."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hf_rocm.errors import OverlayError
from hf_rocm.overlay.claim import claimed

CLAIM = ".hf-rocm-claim"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL)
_PAUSE = 0.05  # seconds


@contextmanager
def exclusive(root: Path, *, timeout: float = 60.0) -> Iterator[list[str]]:
    """Hold the locks of the transformers at `root`; gives the notices that the user should see.

    The folder itself is locked, so no lock file is left inside it. Waits up to `timeout` seconds, then raises
    `OverlayError`. A lock dies with its process, so none is ever stale.
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
    """`.lock` in the virtual environment that holds `root`, if uv manages that environment."""
    for folder in root.parents:
        settings = folder / "pyvenv.cfg"
        if settings.is_file():
            lock = folder / ".lock"
            made_by_uv = any(line.split("=")[0].strip() == "uv" for line in settings.read_text().splitlines())
            return lock if made_by_uv or lock.is_file() else None
    return None


@contextmanager
def _locked(path: Path, flags: int, timeout: float, notices: list[str]) -> Iterator[None]:
    import fcntl

    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        # another user's lock file: the folder's own lock still keeps two of us apart
        notices.append(f"{path} can't be locked ({error.strerror}); don't run uv on this environment meanwhile")
        yield
        return
    stack = ExitStack()
    try:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    claim = path.parent / f".{path.name.lstrip('.')}{CLAIM}"
                    notices.append(
                        f"{path} is on a file system without locks; {claim.name} beside it stands in for one"
                    )
                    stack.enter_context(claimed(claim, timeout=timeout))
                    break
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                if time.monotonic() > deadline:
                    raise OverlayError(
                        "another installer is at work on this environment",
                        facts={"file": path, "expected": f"the lock within {timeout:g} s", "found": "held"},
                        hint="wait for it to finish, then run the command again",
                    ) from error
            time.sleep(_PAUSE)
        yield
    finally:
        stack.close()
        with suppress(OSError):  # the lock is let go of all the same, and what was written is written
            os.close(descriptor)
