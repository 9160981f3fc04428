"""One process at a time checks a kernel; those that come meanwhile wait, and take what it found.

A lock of the system, on a file of its own: it dies with its process, so none is ever stale. Where the
file system has no locks, or the wait gets too long, each process checks for itself, as if it were alone.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FIRST_WORD = 5.0  # seconds of waiting until it is said, once
_PAUSE = 0.05

_logger = logging.getLogger("hf_rocm")


class Turn:
    """This process's turn. found: why the kernel failed in the process that was waited for, if it did."""

    def __init__(self, lock: int | None = None, *, waited: bool = False, found: str | None = None) -> None:
        self.lock, self.waited, self.found = lock, waited, found
        self.reason: str | None = None

    def fail(self, reason: str) -> None:
        """Tell those who wait now; whoever comes later checks anew."""
        self.reason = reason


@contextmanager
def turn(file: Path, *, timeout: float, what: str) -> Iterator[Turn]:
    """Hold the lock `file` within the block, after waiting up to `timeout` seconds for whoever holds it.

    what: the kernel, in words for the log.
    """
    mine = _take(file, timeout, what)
    try:
        yield mine
        if mine.lock is not None:
            _leave(file, mine)
    finally:
        if mine.lock is not None:
            os.close(mine.lock)


def _take(file: Path, timeout: float, what: str) -> Turn:
    began, before, said = time.monotonic(), None, False
    while True:
        lock = None
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), file.stat()):
                note = _note(lock)
                fresh = before is not None and note != before
                return Turn(lock, waited=before is not None, found=str(note["reason"]) if fresh and note else None)
            os.close(lock)  # its holder was done and removed it
        except FileNotFoundError:
            if lock is not None:
                os.close(lock)
        except BlockingIOError:
            assert lock is not None
            before = _note(lock) if before is None else before
            os.close(lock)
        except OSError:  # a cache that can't be written, or no locks there
            if lock is not None:
                os.close(lock)
            return Turn()
        waited = time.monotonic() - began
        if waited > timeout:
            return Turn(waited=True)
        if waited > FIRST_WORD and not said:
            _logger.warning("waiting for another process, which builds and checks %s", what)
            said = True
        time.sleep(_PAUSE)


def _leave(file: Path, mine: Turn) -> None:
    assert mine.lock is not None
    with suppress(OSError):
        if mine.reason is not None:
            text = json.dumps({"reason": mine.reason, "told": secrets.token_hex(8)})
            os.ftruncate(mine.lock, 0)
            os.pwrite(mine.lock, text.encode(), 0)
        elif mine.found is None:  # else others may still wait to read it
            file.unlink()  # while it is held, so that nobody takes it for a lock any more


def _note(lock: int) -> dict[str, str]:
    try:
        note = json.loads(os.pread(lock, 1 << 20, 0))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) and isinstance(note.get("reason"), str) else {}
