"""Run a command under strace, in one child process per system call. Every child has its own site-packages directory.

A child first makes `lead - number` calls without effect, so that strace's `when=<lead>` applies to the command's call
with this number. strace counts calls per process. It attaches to the children's parent, a fork of the process that has
imported everything, so that the parent makes fewer than `lead` calls and `lead` can be small. The importing process is
never traced. It starts one such parent for each request that it reads.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hf_rocm.errors import HfRocmError
from hf_rocm.overlay import catalog as catalogs
from hf_rocm.overlay import commands, integrity  # noqa: F401 (imported here, so that children import nothing)
from hf_rocm.overlay.install import Interrupted

NO_DESCRIPTOR = 2**20
NOWHERE = "/nowhere/at/all"
BEGIN = "/the/command/begins/here"
READY = "ready for strace"
# PR_SET_PTRACER and PR_SET_PTRACER_ANY. By default, some systems allow only an ancestor to trace a process.
_ANY_TRACER = 0x59616D61, 2**64 - 1
_DIRECTORY_ENTRIES = {"x86_64": 217, "aarch64": 61}

# calls without effect, which strace counts
IDLE: dict[str, Callable[[], object]] = {
    "openat": lambda: os.open(NOWHERE, os.O_RDONLY),
    "read": lambda: os.read(NO_DESCRIPTOR, 1),
    "write": lambda: os.write(NO_DESCRIPTOR, b""),
    "close": lambda: os.close(NO_DESCRIPTOR),
    "fsync": lambda: os.fsync(NO_DESCRIPTOR),
    "fchmod": lambda: os.fchmod(NO_DESCRIPTOR, 0),
    "fchown": lambda: os.fchown(NO_DESCRIPTOR, 0, 0),
    "rename": lambda: os.rename(NOWHERE, NOWHERE),  # noqa: PTH104
    "renameat": lambda: os.rename(NOWHERE, NOWHERE),  # noqa: PTH104
    "unlink": lambda: os.unlink(NOWHERE),  # noqa: PTH108
    "unlinkat": lambda: os.unlink(NOWHERE),  # noqa: PTH108
    "utimensat": lambda: os.utime(NOWHERE, (0, 0)),
    "access": lambda: os.access(NOWHERE, os.W_OK),
    "faccessat": lambda: os.access(NOWHERE, os.W_OK),
    "faccessat2": lambda: os.access(NOWHERE, os.W_OK),
    "newfstatat": lambda: os.stat(NOWHERE),  # noqa: PTH116
    "fstat": lambda: os.fstat(NO_DESCRIPTOR),
    "readlink": lambda: os.readlink(NOWHERE),  # noqa: PTH115
    "readlinkat": lambda: os.readlink(NOWHERE),  # noqa: PTH115
    "flock": lambda: _flock(NO_DESCRIPTOR, 0),
    "getdents64": lambda: ctypes.CDLL(None).syscall(_DIRECTORY_ENTRIES[platform.machine()], NO_DESCRIPTOR, 0, 0),
}


def _flock(descriptor: int, operation: int) -> None:
    import fcntl

    fcntl.flock(descriptor, operation)


def serve() -> None:
    """Run each request from stdin, one JSON object per line, in a separate process."""
    catalog = None
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        catalog = catalog or catalogs.load(Path(request["overlays"]))
        parent = os.fork()
        if not parent:
            ctypes.CDLL(None).prctl(_ANY_TRACER[0], ctypes.c_ulong(_ANY_TRACER[1]), 0, 0, 0)
            print(READY, os.getpid(), flush=True)
            sys.stdin.readline()
            print(json.dumps(run(request, catalog)), flush=True)
            os._exit(0)
        os.waitpid(parent, 0)


def run(request: dict[str, object], catalog: catalogs.Catalog) -> list[int]:
    """Run the command in one child per site. Returns the children's statuses, as returned by waitpid."""
    command = {"install": commands.install, "uninstall": commands.uninstall}[str(request["command"])]
    idle = IDLE[str(request["call"])] if request["call"] else None
    statuses = []
    for number, site in request["targets"]:  # type: ignore[attr-defined]
        child = os.fork()
        if not child:
            code = 3
            try:
                for _ in range(int(request["lead"]) - number if idle else 0):  # type: ignore[call-overload]
                    with suppress(OSError):
                        idle()  # type: ignore[misc]
                if idle is None:
                    os.access(BEGIN, os.F_OK)
                plan, _ = command(request["models"], transformers_path=site, catalog=catalog)  # type: ignore[operator]
                code = 1 if plan.refusals else 0
            except HfRocmError as error:
                code = 1
                if "could not be restored" in error.message:
                    code = 4
            except Interrupted as interrupted:
                code = 128 + interrupted.signal
            except KeyboardInterrupt:
                code = 130
            except BaseException:  # noqa: BLE001 (the test reports every error of a child)
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        statuses.append(os.waitpid(child, 0)[1])
    return statuses


if __name__ == "__main__":
    serve()
