"""Passed checks on disk: one small file for each check, in the user's cache folder.

A file is used only if no one but this user or root can have written it, and if it contains exactly the facts of the
check: the kernel, the kind of call, the GPU, its driver and the releases. No function here raises an error: if the
folder can't be read or written, checks are not recorded.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from hf_rocm import files, options
from hf_rocm.architectures import driver_version


def key(**facts: Any) -> str:
    """The key of a check: these facts and the driver of this machine."""
    return json.dumps({**facts, "driver": _driver()}, sort_keys=True)


def passed(key: str) -> float | None:
    """When this check passed, in seconds since the epoch, or None if no pass is recorded."""
    for file in _files(key):
        content = files.read_own(file)
        if content is not None and content[0] == f"{key}\n":
            return content[1]
    return None


def record(key: str) -> None:
    """Record a pass. Any number of processes may do so at once."""
    with suppress(OSError):
        for file in _files(key)[-1:]:
            file.parent.mkdir(parents=True, exist_ok=True)
            files.write_own(file, f"{key}\n")


def is_empty() -> bool:
    """Whether no passed check is recorded."""
    with suppress(OSError):
        return not any((options.cache_folder() / "probes").glob("*.json"))
    return True


def lock(key: str) -> Path | None:
    """The lock file for processes that run this check at the same time; None if there is no folder for it."""
    try:
        return options.cache_folder() / "turns" / f"{_digest(key)}.lock"
    except OSError:
        return None


def _files(key: str) -> list[Path]:
    """The files of root and of this user. Every user has a separate file, so that users can share the folder."""
    try:
        folder = options.cache_folder() / "probes"
    except OSError:
        return []
    users = dict.fromkeys((0, os.geteuid()))
    return [folder / f"{_digest(key)}-{user}.json" for user in users]


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@cache
def _driver() -> str:
    """The release of the Linux kernel and, if it is built separately, of the amdgpu driver."""
    return " ".join(filter(None, (platform.release(), driver_version())))
