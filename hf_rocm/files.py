"""Atomic file replacement, command outputs and file locks, for the whole package.

Overlays are written by `overlay.install`, which stages several files before it replaces the first one.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# Seconds between two attempts.
_PAUSE = 0.05
_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# follow no symbolic link, and do not wait for the other end of a FIFO
_SAFE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# prefixes of the paths of the standard streams, which may be regular files that the shell has already opened
_STREAMS = ("/dev/fd/", "/dev/stdout", "/dev/stderr", "/proc/")


def write(path: Path, content: str | bytes) -> None:
    """Replace a file atomically: readers see either the old content or the new content, even after a crash.

    The umask determines its permissions. Raises `OSError`.
    """
    with replacement(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file in the same folder; it replaces `path` if the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        yield temporary
        descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_output(path: Path, content: str | bytes) -> None:
    """Write a result to the path that the user gave; see `output`. Raises `OSError`."""
    with output(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def output(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file; its content is written to `path` if the block ends without an error.

    A regular file is replaced atomically and keeps its permissions and, as far as this user is allowed to set them, its
    owner and group; the umask determines the permissions of a new file. For a symbolic link, the target is replaced and
    the link is kept. The content is written directly to a character device, a FIFO or a standard stream. Raises
    `OSError` for anything else.
    """
    check_output(path)
    if _is_stream(path):
        with tempfile.TemporaryDirectory(prefix="hf-rocm-") as folder:
            temporary = Path(folder) / "content"
            yield temporary
            _append(temporary, path)
        return
    target = Path(os.path.realpath(path))
    old = _status(target)
    with replacement(target) as temporary:
        # The old file may be private, so other users must not read the new one.
        if old is not None:
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        yield temporary
        if old is not None:
            _copy_ownership(old, temporary)


def check_output(path: Path, *, parents: bool = False) -> None:
    """Raise `OSError` if `path` is not writable, before the result is computed. Changes nothing.

    parents: missing parent folders are not an error, because they will be created.
    """
    status = _status(path)
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder, not a file", str(path))
    if status is not None and (stat.S_ISBLK(status.st_mode) or stat.S_ISSOCK(status.st_mode)):
        raise OSError(errno.EINVAL, "is a disk or a socket, not a file", str(path))
    if _is_stream(path):
        place, access = path, os.W_OK
    else:
        place, access = Path(os.path.realpath(path)).parent, os.W_OK | os.X_OK
        while parents and _status(place) is None:
            place = place.parent
    if _status(place) is None:
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(place))
    if not _is_stream(path) and not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
    if not os.access(place, access):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))


def write_own(path: Path, content: str) -> None:
    """Replace a file so that only this user may write to it, as `read_own` requires. Raises `OSError`."""
    with replacement(path) as temporary:
        temporary.write_bytes(content.encode())
        temporary.chmod(stat.S_IMODE(temporary.stat().st_mode) & ~_BY_OTHERS)


def read_own(path: Path) -> tuple[str, float] | None:
    """Return the text of a file that only this user or root can have written, and its mtime in seconds.

    Returns None for another user's file, a file that others may write to, a symbolic link or another file that is not
    regular, an unreadable file, a file that is not UTF-8 text, and a missing file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _SAFE_FLAGS)
    except (OSError, ValueError):
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not is_own(status) or status.st_mode & _BY_OTHERS:
            return None
        try:
            return file.read().decode(), status.st_mtime
        except (OSError, UnicodeDecodeError):
            return None


def open_own(path: Path) -> int | None:
    """Open or create a file of this user or root for reading and writing, and return its descriptor.

    Returns None if the file belongs to another user, is not regular or has several hard links. Raises `OSError`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _SAFE_FLAGS, 0o666)
    status = os.fstat(descriptor)
    if is_own(status) and status.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    return None


def is_own(status: os.stat_result) -> bool:
    """Return whether this is a regular file that belongs to this user or to root."""
    return stat.S_ISREG(status.st_mode) and status.st_uid in (os.geteuid(), 0)


def is_file(path: Path) -> bool:
    """Return whether `path` is a regular file. Unlike `Path.is_file`, it never raises."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def lock(descriptor: int) -> bool:
    """Lock an open file exclusively. Returns False if the lock is held through another descriptor.

    The system releases the lock when the descriptor is closed or the process ends, so a lock is never stale. Raises
    `OSError` where the file system does not support locks.
    """
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def poll(
    attempt: Callable[[], T | None], *, timeout: float, waiting: Callable[[float], None] = lambda seconds: None
) -> T | None:
    """Call `attempt` until it returns a value other than None. Returns that value, or None after `timeout` seconds.

    `attempt` is called at least once. waiting: a function that is called before every pause with the number of
    seconds since the first attempt.
    """
    began = time.monotonic()
    while (result := attempt()) is None:
        waited = time.monotonic() - began
        if waited > timeout:
            return None
        waiting(waited)
        time.sleep(_PAUSE)
    return result


def _is_stream(path: Path) -> bool:
    """Return whether `path` is written to in place: a character device, a FIFO or a standard stream."""
    status = _status(path)
    if status is None or stat.S_ISDIR(status.st_mode):
        return False
    return not stat.S_ISREG(status.st_mode) or str(path.absolute()).startswith(_STREAMS)


def _status(path: Path) -> os.stat_result | None:
    """Return the status of the file at `path`, or None if there is none. Raises `OSError` if it is not accessible."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _append(file: Path, stream: Path) -> None:
    descriptor = os.open(stream, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    with os.fdopen(descriptor, "wb", buffering=0) as target, file.open("rb") as content:
        while part := content.read(1 << 20):
            # A pipe may accept only a part.
            while part:
                part = part[target.write(part) :]


def _copy_ownership(old: os.stat_result, new: Path) -> None:
    """Copy owner, group and permissions of the old file to the new one, as far as this user is allowed to."""
    status = new.stat()
    if (status.st_uid, status.st_gid) != (old.st_uid, old.st_gid):
        with suppress(PermissionError):
            os.chown(new, old.st_uid, old.st_gid)
    new.chmod(stat.S_IMODE(old.st_mode))
