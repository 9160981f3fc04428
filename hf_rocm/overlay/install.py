"""Execute a plan: the only code that writes to an installed transformers.

Every file is replaced by a complete new file and never opened for writing, because package managers hard-link the files
in site-packages from a cache that other environments share. All new files are on disk before the first replacement. If
anything fails after that, or a signal arrives, this run's changes are undone. Every file is valid at all times.
"""

from __future__ import annotations

import os
import secrets
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from hf_rocm.errors import OverlayError
from hf_rocm.overlay.block import sha256
from hf_rocm.overlay.bytecode import compiled_forms
from hf_rocm.overlay.disk import Disk
from hf_rocm.overlay.plan import Action, Plan

# Not `.py`: transformers reads every `*.py` in its model folders when it is imported.
LEFTOVER = ".hf-rocm-tmp"
_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    # Windows lacks SIGHUP.
    if hasattr(signal, name)
)


class Interrupted(BaseException):
    """A signal arrived while files were being written, and everything was undone. signal: its number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}; everything was undone")
        self.signal = number


def execute(plan: Plan, *, disk: Disk | None = None) -> None:
    """Execute the plan, all or nothing. The caller must hold the lock, and must have made the plan while holding it.

    Raises `OverlayError` for refusals, for file system errors and for files that changed in the meantime, and
    `Interrupted` if a signal arrives before the end.
    """
    plan.check()
    disk = disk or Disk()
    _check_directories(plan)
    with _deferred_signals() as check_signals:
        try:
            _run(plan, disk, check_signals)
        except OSError as error:
            raise OverlayError(
                f"{plan.command} could not write; everything was undone",
                facts={"file": error.filename or plan.installation.root, "found": error.strerror or error},
                hint="free space or fix the permissions, then run the command again",
            ) from error


def _run(plan: Plan, disk: Disk, check_signals: Callable[[], None]) -> None:
    staged: list[tuple[Action, Path]] = []
    begun: list[Action] = []
    try:
        _sweep(plan.installation.root, disk)
        for action in plan.writes:
            check_signals()
            staged.append((action, _stage(action, disk)))
        for action, temporary in staged:
            check_signals()
            begun.append(action)
            _put(action, temporary, disk)
        for action in begun:
            _sync_directory(action.file.parent, disk)
            _verify(action, disk)
        check_signals()
    except BaseException as error:
        left = [temporary for _, temporary in staged if not _removed(temporary, disk)]
        _undo(begun, disk, cause=error)
        if left and isinstance(error, OSError):
            raise _left_behind(left, plan, error) from error
        # Show the cause to the user; the next run removes leftovers.
        raise


def _removed(temporary: Path, disk: Disk) -> bool:
    with suppress(OSError):
        disk.remove(temporary)
        return True
    return False


def _left_behind(left: list[Path], plan: Plan, error: OSError) -> OverlayError:
    """The error if every stock file is unchanged but temporary files can't be removed, as in an append-only folder."""
    return OverlayError(
        f"{plan.command} could not write, and could not remove its temporary files; every stock file is unchanged",
        facts={
            "file": error.filename or plan.installation.root,
            "found": error.strerror or error,
            **{f"left {number}": path for number, path in enumerate(left, 1)},
        },
        hint="let this user remove files there (lsattr -d shows a folder's attributes; chattr -a FOLDER), then run "
        "the command again, which removes them",
    )


def _stage(action: Action, disk: Disk) -> Path:
    """Write the new content to a temporary file next to the old one, with the old file's owner and mode.

    Returns the path of the temporary file. Raises `OverlayError` if the old content is not that of the plan.
    """
    if disk.read(action.file) != action.before:
        raise OverlayError(
            f"{action.file.name} was changed by another process while the command ran",
            facts={"file": action.file, "expected": "the content that the plan is based on", "found": "other content"},
            hint="run the command again",
        )
    old = disk.stat(action.file)
    temporary = action.file.with_name(f".{action.file.name}.{secrets.token_hex(8)}{LEFTOVER}")
    descriptor = disk.create(temporary)
    try:
        try:
            view = memoryview(action.after)
            while view:
                view = view[disk.write(descriptor, bytes(view)) :]
            new = os.fstat(descriptor)
            if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
                disk.own(descriptor, old.st_uid, old.st_gid)
            disk.mode(descriptor, stat.S_IMODE(old.st_mode))
            if (new.st_size, int(new.st_mtime)) == (old.st_size, int(old.st_mtime)):
                # Python identifies a source file by size and mtime, and an unknown folder may contain its old .pyc
                disk.touch(descriptor, int(new.st_mtime) + 1)
            disk.sync(descriptor)
        finally:
            disk.close(descriptor)
    except BaseException:
        with suppress(OSError):
            disk.remove(temporary)
        raise
    return temporary


def _put(action: Action, temporary: Path, disk: Disk) -> None:
    _drop_compiled(action.file, disk)
    disk.replace(temporary, action.file)
    # once more, because another process may have compiled the old text in the meantime
    _drop_compiled(action.file, disk)


def _drop_compiled(source: Path, disk: Disk) -> None:
    for path in compiled_forms(source, disk):
        disk.remove(path)


def _verify(action: Action, disk: Disk) -> None:
    actual = disk.read(action.file)
    if actual != action.after:
        raise OverlayError(
            f"{action.file.name} does not contain what was written",
            facts={
                "file": action.file,
                "expected": f"sha256 {sha256(action.after)}",
                "found": f"sha256 {sha256(actual)}" if actual is not None else "no file",
            },
            hint="check the file system, then run the command again",
        )


def _undo(begun: list[Action], disk: Disk, *, cause: BaseException) -> None:
    """Restore this run's files that have the new content. Changes by other processes are kept."""
    failed = []
    for action in reversed(begun):
        try:
            if disk.read(action.file) == action.after:
                _put(action, _stage(action.inverse(), disk), disk)
                _sync_directory(action.file.parent, disk)
        except (OSError, OverlayError) as error:
            failed.append(f"{action.file}: {error}")
    if failed:
        raise OverlayError(
            "writing failed, and some files could not be restored (every file is valid, either stock or patched)",
            facts={"cause": cause, **{f"file {n}": text for n, text in enumerate(failed, 1)}},
            hint="run `hf-rocm status`, then `hf-rocm uninstall-overlays` once the cause is gone",
        ) from cause


def _sync_directory(directory: Path, disk: Disk) -> None:
    descriptor = disk.open_directory(directory)
    try:
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)


def _sweep(root: Path, disk: Disk) -> None:
    """Remove the temporary files of killed runs. Safe under the lock, because no other installer is writing."""
    for left in root.glob(f"models/*/.modeling_*{LEFTOVER}"):
        # The target of a symbolic link does not belong to this package.
        if not left.parent.is_symlink():
            disk.remove(left)


def _check_directories(plan: Plan) -> None:
    for action in plan.writes:
        if not os.access(action.file.parent, os.W_OK | os.X_OK):
            raise OverlayError(
                "the folder of a stock file is not writable",
                facts={"file": action.file, "expected": "a writable folder", "found": "read-only, or another owner"},
                hint="run as the owner of this environment, or patch in memory: hf_rocm.activate()",
            )


@contextmanager
def _deferred_signals() -> Iterator[Callable[[], None]]:
    """Defer signals while files are replaced. Yields a function that raises `Interrupted` if a signal has arrived."""
    arrived: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    def check() -> None:
        if arrived:
            raise Interrupted(arrived[0])

    if threading.current_thread() is not threading.main_thread():
        # Python runs signal handlers only in the main thread.
        yield check
        return
    previous = {number: signal.signal(number, record) for number in _SIGNALS}
    try:
        yield check
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    # After the last file, there is nothing to undo, but the signal must be delivered.
    if arrived:
        signal.raise_signal(arrived[0])
