"""One process at a time checks a kernel; other processes wait for it and use its result.

The lock is a file lock of the operating system on a separate file. It is released when the process that holds it
ends, so no lock is ever stale. If the file system does not support locks, or the wait takes too long, every process
runs the check itself.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_rocm import files

# Seconds of waiting before one log message.
FIRST_MESSAGE = 5.0

_logger = logging.getLogger("hf_rocm")


class Turn:
    """One process's turn to check a kernel.

    lock: the descriptor of the locked file, or None without a lock. waited: whether another process had the lock
    before. failure: why the kernel failed in the process that this one waited for, or None.
    """

    def __init__(self, lock: int | None = None, *, waited: bool = False, failure: str | None = None) -> None:
        self.lock, self.waited, self.failure = lock, waited, failure
        self.reason: str | None = None

    def fail(self, reason: str) -> None:
        """Pass a failure to the processes that are waiting now. Later processes run the check again."""
        self.reason = reason


@contextmanager
def turn(file: Path | None, *, timeout: float, kernel: str) -> Iterator[Turn]:
    """Hold a lock on `file` within the block, after waiting up to `timeout` seconds for its holder.

    file: None if there is no folder for it; the block then runs without a lock, as it does after the timeout.
    kernel: its name, for the log.
    """
    this_turn = Turn() if file is None else _take(file, timeout, kernel)
    try:
        yield this_turn
        if this_turn.lock is not None and file is not None:
            _leave(file, this_turn)
    finally:
        if this_turn.lock is not None:
            os.close(this_turn.lock)


def _take(file: Path, timeout: float, kernel: str) -> Turn:
    # The note in the file while another process had the lock.
    before: dict[str, str] | None = None
    logged = False

    def attempt() -> Turn | None:
        nonlocal before
        lock = None
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = files.open_own(file)
            if lock is None:
                # The file belongs to another user, is not regular or has several hard links; it is not read or written.
                return Turn()
            if not files.lock(lock):
                before = _note(lock) if before is None else before
            elif os.path.samestat(os.fstat(lock), file.lstat()):
                note = _note(lock)
                fresh = before is not None and note != before
                return Turn(lock, waited=before is not None, failure=str(note["reason"]) if fresh and note else None)
        except FileNotFoundError:
            # The holder of the lock has finished and removed the file.
            pass
        except OSError:
            # The cache folder can't be written or does not support locks.
            if lock is not None:
                os.close(lock)
            return Turn()
        if lock is not None:
            os.close(lock)
        return None

    def waiting(seconds: float) -> None:
        nonlocal logged
        if seconds > FIRST_MESSAGE and not logged:
            _logger.warning("waiting for another process, which is building and checking %s", kernel)
            logged = True

    return files.poll(attempt, timeout=timeout, waiting=waiting) or Turn(waited=True)


def _leave(file: Path, this_turn: Turn) -> None:
    assert this_turn.lock is not None
    with suppress(OSError):
        if this_turn.reason is not None:
            text = json.dumps({"reason": this_turn.reason, "id": secrets.token_hex(8)})
            os.ftruncate(this_turn.lock, 0)
            os.pwrite(this_turn.lock, text.encode(), 0)
        elif this_turn.failure is None:
            # A file that contains a failure is kept, because other processes may still be waiting to read it. Any other
            # file is removed while it is still locked, so that this never happens while another process has the lock.
            file.unlink()


def _note(lock: int) -> dict[str, str]:
    try:
        note = json.loads(os.pread(lock, 1 << 20, 0))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) and isinstance(note.get("reason"), str) else {}
