"""What stands in for a lock where the file system has none: a file that says who is writing.

It dies with nobody, so it says enough to tell whether its writer is still there: the host, the process and when that
process began. One left by a process of this host that is gone, or by another host long ago, does not count.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_rocm.errors import OverlayError

OLD = 600.0  # seconds; an installer needs a few
_PAUSE = 0.05


@contextmanager
def claimed(path: Path, *, timeout: float) -> Iterator[None]:
    """Hold the claim file at `path`. Waits up to `timeout` seconds, then raises `OverlayError`."""
    deadline = time.monotonic() + timeout
    mine = f"{socket.gethostname()}\n{os.getpid()}\n{_began(os.getpid())}\n{secrets.token_hex(8)}\n"
    while not _create(path, mine):
        _clear_away(path)
        if time.monotonic() > deadline:
            host, process, *_ = [*_read(path).splitlines(), "?", "?"]
            raise OverlayError(
                "another installer is at work on this environment",
                facts={
                    "file": path,
                    "expected": f"the claim within {timeout:g} s",
                    "found": f"{host}, process {process}",
                },
                hint="wait for it to finish; if nothing runs there, remove this file",
            )
        time.sleep(_PAUSE)
    try:
        yield
    finally:
        with suppress(OSError):  # what was written is written, and a claim of a process that is gone does not count
            if _read(path) == mine:
                path.unlink(missing_ok=True)


def _create(path: Path, text: str) -> bool:
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    draft.write_text(text, encoding="utf-8")
    try:
        os.link(draft, path)  # complete from its first moment, and never over another's
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _clear_away(path: Path) -> None:
    """Remove a claim that nobody holds any more; put it back if another one turns out to have taken its place."""
    seen = _read(path)
    if not seen or _is_held(path, seen):
        return
    aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with suppress(FileNotFoundError):  # somebody else was quicker
        path.rename(aside)
        if _read(aside) != seen:
            with suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _is_held(path: Path, text: str) -> bool:
    host, process, began, *_ = [*text.splitlines(), "", "", ""]
    if host == socket.gethostname() and process.isdecimal():
        return _began(int(process)) == began != ""
    try:
        return time.time() - path.stat().st_mtime < OLD
    except FileNotFoundError:
        return False


def _began(process: int) -> str:
    """When a process of this machine began, in its own terms; empty if it is gone or unknown."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[19]
    except (OSError, IndexError):
        return ""
