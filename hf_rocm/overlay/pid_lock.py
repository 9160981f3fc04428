"""A lock file for file systems without locks: a claim that names its writer.

The system does not remove the file when its writer ends, so the claim records the host, the process ID and the start
time of the process. A claim from this host is ignored if its process has ended. A claim from another host, or one
without a start time, is ignored if it is old.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_rocm import files
from hf_rocm.errors import OverlayError

# Seconds after which a claim from another host, or without a start time, is ignored; an installer takes a few seconds.
OLD = 600.0


@contextmanager
def claimed(path: Path, *, timeout: float) -> Iterator[None]:
    """Create the claim at `path`, and remove it at the end of the block.

    Waits up to `timeout` seconds for another writer's claim to disappear, then raises `OverlayError`.
    """
    own_claim = f"{socket.gethostname()}\n{os.getpid()}\n{_start_time(os.getpid())}\n{secrets.token_hex(8)}\n"

    def attempt() -> bool | None:
        if _create(path, own_claim):
            return True
        _remove_stale(path)
        return None

    if files.poll(attempt, timeout=timeout) is None:
        host, process, *_ = [*_read(path).splitlines(), "?", "?"]
        raise OverlayError(
            "another installer is running in this environment",
            facts={"file": path, "expected": f"the claim within {timeout:g} s", "found": f"{host}, process {process}"},
            hint="wait for it to finish; if no installer is running there, remove this file",
        )
    try:
        yield
    finally:
        # A claim that can't be removed is ignored once this process has ended.
        with suppress(OSError):
            if _read(path) == own_claim:
                path.unlink(missing_ok=True)


def _create(path: Path, text: str) -> bool:
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    draft.write_text(text, encoding="utf-8")
    try:
        # A hard link creates the claim together with its content, and never replaces another claim.
        os.link(draft, path)
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


def _remove_stale(path: Path) -> None:
    """Remove a stale claim. If another claim replaced it in the meantime, restore the new claim."""
    seen = _read(path)
    if not seen or _is_live(path, seen):
        return
    aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    # Another process may have been faster.
    with suppress(FileNotFoundError):
        path.rename(aside)
        if _read(aside) != seen:
            with suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _is_live(path: Path, text: str) -> bool:
    host, process, start_time, *_ = [*text.splitlines(), "", "", ""]
    # Without /proc, a claim has no start time.
    if host == socket.gethostname() and process.isdecimal() and start_time:
        return _start_time(int(process)) == start_time
    try:
        return time.time() - path.stat().st_mtime < OLD
    except FileNotFoundError:
        return False


def _start_time(process: int) -> str:
    """Return the start time of a process on this machine, in clock ticks since boot, or an empty string.

    The string is empty if the process has ended or if its start time can't be read.
    """
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[19]
    except (OSError, IndexError):
        return ""
