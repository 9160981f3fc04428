"""The machine as doctor may touch it: files, commands, variables, packages, and children that may crash in its place.

Everything that doctor knows comes through here, so that a recorded machine can stand in for this one.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hf_rocm import options
from hf_rocm.diagnostics.doctor.transformers import TransformersFacts, transformers_facts
from hf_rocm.overlay.facts import AiterFacts, TorchFacts, aiter_facts, torch_facts


@dataclass(frozen=True)
class System:
    """name: `Linux`, `Windows`, …; release: the kernel's; python: the version of the interpreter."""

    name: str
    release: str
    python: str


@dataclass(frozen=True)
class Node:
    """A file as this user sees it. group: its group's name or number; modified: seconds since the epoch."""

    mode: str = ""
    group: str = ""
    readable: bool = True
    writable: bool = True
    modified: float = 0.0
    size: int = 0

    @property
    def usable(self) -> bool:
        return self.readable and self.writable


@dataclass(frozen=True)
class Ran:
    """A command's outcome. code: None if it didn't end in time."""

    code: int | None
    out: str = ""
    err: str = ""

    @property
    def text(self) -> str:
        return self.out + self.err


@dataclass(frozen=True)
class Answer:
    """What a child process found out. facts: as far as it came; stage: where it ended if it didn't end well."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    stage: str = ""


class Machine(Protocol):
    """What doctor asks of a machine. No method raises for what may be missing."""

    @property
    def system(self) -> System: ...
    @property
    def environment(self) -> Mapping[str, str]: ...
    @property
    def groups(self) -> tuple[str, ...]: ...
    def text(self, path: str) -> str | None: ...
    def names(self, folder: str) -> tuple[str, ...]: ...
    def mentions(self, path: str, word: bytes) -> bool: ...
    def look(self, path: str) -> Node | None: ...
    def free_bytes(self, path: str) -> int | None: ...
    def resolves(self) -> bool | None: ...
    def run(self, *command: str, timeout: float) -> Ran | None: ...
    def packages(self) -> Mapping[str, str]: ...
    def torch(self) -> TorchFacts: ...
    def aiter(self) -> AiterFacts: ...
    def transformers(self) -> TransformersFacts: ...
    def ask(self, task: str, *, timeout: float) -> Answer: ...


class ThisMachine:
    """The machine that we run on."""

    @property
    def system(self) -> System:
        return System(platform.system(), platform.release(), platform.python_version())

    @property
    def environment(self) -> Mapping[str, str]:
        return options.environment()

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(_group_name(each) for each in os.getgroups()) if hasattr(os, "getgroups") else ()

    def text(self, path: str) -> str | None:
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def names(self, folder: str) -> tuple[str, ...]:
        try:
            return tuple(sorted(each.name for each in Path(folder).iterdir()))
        except OSError:
            return ()

    def mentions(self, path: str, word: bytes) -> bool:
        try:
            with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return content.find(word) >= 0
        except (OSError, ValueError):  # an empty file can't be mapped
            return False

    def look(self, path: str) -> Node | None:
        try:
            found = Path(path).stat()
        except OSError:
            return None
        return Node(
            mode=stat.filemode(found.st_mode),
            group=_group_name(found.st_gid),
            readable=os.access(path, os.R_OK),
            writable=os.access(path, os.W_OK),
            modified=found.st_mtime,
            size=found.st_size,
        )

    def free_bytes(self, path: str) -> int | None:
        try:
            return shutil.disk_usage(path).free
        except OSError:
            return None

    def resolves(self) -> bool | None:
        """Whether this machine's name leads to an address that a socket here can be bound to, as gloo tries it."""
        try:
            found = socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)
        except OSError:
            return False
        return any(_can_bind(family, address) for family, _, _, _, address in found)

    def run(self, *command: str, timeout: float) -> Ran | None:
        name, *rest = command
        found = shutil.which(name) or shutil.which(name, path="/opt/rocm/bin")
        if found is None:
            return None
        return _run([found, *rest], timeout)

    def packages(self) -> Mapping[str, str]:
        from importlib.metadata import distributions

        found: dict[str, str] = {}
        for each in distributions():
            name = each.metadata["Name"] if each.metadata else None
            if name:
                found.setdefault(name.lower().replace("_", "-"), each.version or "")
        return found

    def torch(self) -> TorchFacts:
        return torch_facts()

    def aiter(self) -> AiterFacts:
        return aiter_facts()

    def transformers(self) -> TransformersFacts:
        return transformers_facts()

    def ask(self, task: str, *, timeout: float) -> Answer:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "answer.json"
            command = [sys.executable, "-m", "hf_rocm.diagnostics.doctor.child", task, str(file)]
            # what lies in the working directory must not pass for a package, and what we import must be found
            path = os.pathsep.join(str(Path(each).absolute()) for each in sys.path if each)
            ran = _run(command, timeout, environment={**self.environment, "PYTHONPATH": path}, folder=folder)
            return read_answer(self.text(str(file)), ran)


def read_answer(text: str | None, ran: Ran) -> Answer:
    """What the child wrote before it ended, and how it ended."""
    try:
        told: dict[str, Any] = json.loads(text or "{}")
    except ValueError:  # killed while it wrote
        told = {}
    facts, stage, error = told.get("facts", {}), str(told.get("stage", "start")), told.get("error")
    if ran.code is None:
        error = "it did not end in time"
    elif ran.code < 0:
        error = f"it was ended by signal {-ran.code}"
    elif ran.code and not error:
        error = (ran.err.strip().splitlines() or [f"exit code {ran.code}"])[-1]
    return Answer(facts, error, stage if error else "")


def _run(
    command: list[str], timeout: float, *, environment: Mapping[str, str] | None = None, folder: str | None = None
) -> Ran:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            env=environment,
            cwd=folder,
        )
    except subprocess.TimeoutExpired:
        return Ran(None)
    except OSError as error:
        return Ran(127, err=str(error))
    return Ran(done.returncode, done.stdout, done.stderr)


def _can_bind(family: int, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _group_name(number: int) -> str:
    try:
        import grp

        return grp.getgrgid(number).gr_name
    except (ImportError, KeyError):
        return str(number)
