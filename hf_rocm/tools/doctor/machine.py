"""Doctor's access to a machine: files, commands, environment variables, packages and child processes.

All facts are read through this interface, except those in a named model's files, so that a recorded machine can replace
the real one.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import re
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
from hf_rocm.generation import ledger
from hf_rocm.generation.ledger import Event
from hf_rocm.overlay.facts import AiterFacts, TorchFacts, aiter_facts, torch_facts
from hf_rocm.tools.doctor.transformers import TransformersFacts, transformers_facts


@dataclass(frozen=True)
class System:
    """The operating system. name: `Linux`, `Windows`, …. release: the kernel's release. python: the interpreter's
    version."""

    name: str
    release: str
    python: str


@dataclass(frozen=True)
class Node:
    """A file, and this user's access rights to it.

    group: the name or number of the file's group. modified: seconds since the epoch.
    """

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
class CommandResult:
    """The outcome of a command. code: the exit code, None after a timeout."""

    code: int | None
    out: str = ""
    err: str = ""

    @property
    def text(self) -> str:
        return self.out + self.err


@dataclass(frozen=True)
class TaskResult:
    """The result of a child process. facts: those that it collected before it ended. stage: the stage in which it
    failed, if any."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    stage: str = ""


class Machine(Protocol):
    """The interface to a machine. No method raises for a missing file, command or package."""

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
    def run(self, *command: str, timeout: float) -> CommandResult | None: ...
    def packages(self) -> Mapping[str, str]: ...
    def torch(self) -> TorchFacts: ...
    def aiter(self) -> AiterFacts: ...
    def transformers(self) -> TransformersFacts: ...
    def graph_events(self) -> tuple[Event, ...]: ...
    def ledger(self) -> str | None: ...
    def run_task(self, task: str, *, timeout: float) -> TaskResult: ...


class ThisMachine:
    """The machine that this process runs on."""

    @property
    def system(self) -> System:
        return System(platform.system(), platform.release(), platform.python_version())

    @property
    def environment(self) -> Mapping[str, str]:
        return options.environment()

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(_group_name(group) for group in os.getgroups()) if hasattr(os, "getgroups") else ()

    def text(self, path: str) -> str | None:
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def names(self, folder: str) -> tuple[str, ...]:
        try:
            return tuple(sorted(path.name for path in Path(folder).iterdir()))
        except OSError:
            return ()

    def mentions(self, path: str, word: bytes) -> bool:
        try:
            with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return content.find(word) >= 0
        except (OSError, ValueError):
            # An empty file can't be mapped.
            return False

    def look(self, path: str) -> Node | None:
        try:
            status = Path(path).stat()
        except OSError:
            return None
        return Node(
            mode=stat.filemode(status.st_mode),
            group=_group_name(status.st_gid),
            readable=os.access(path, os.R_OK),
            writable=os.access(path, os.W_OK),
            modified=status.st_mtime,
            size=status.st_size,
        )

    def free_bytes(self, path: str) -> int | None:
        try:
            return shutil.disk_usage(path).free
        except OSError:
            return None

    def resolves(self) -> bool | None:
        """Return whether the host name resolves to an address that a local socket can bind to, as gloo requires."""
        try:
            addresses = socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)
        except OSError:
            return False
        return any(_can_bind(family, address) for family, _, _, _, address in addresses)

    def run(self, *command: str, timeout: float) -> CommandResult | None:
        name, *rest = command
        executable = shutil.which(name) or shutil.which(name, path="/opt/rocm/bin")
        if executable is None:
            return None
        return _run([executable, *rest], timeout)

    def packages(self) -> Mapping[str, str]:
        from importlib.metadata import distributions

        versions: dict[str, str] = {}
        for distribution in distributions():
            head = (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "").partition("\n\n")[0]
            fields = dict(re.findall(r"^(Name|Version): *(.*?)\s*$", head, re.MULTILINE))
            if "Name" in fields:
                versions.setdefault(fields["Name"].lower().replace("_", "-"), fields.get("Version", ""))
        return versions

    def torch(self) -> TorchFacts:
        return torch_facts()

    def aiter(self) -> AiterFacts:
        return aiter_facts()

    def transformers(self) -> TransformersFacts:
        return transformers_facts()

    def graph_events(self) -> tuple[Event, ...]:
        return ledger.events()

    def ledger(self) -> str | None:
        try:
            return str(ledger.path())
        except OSError:
            # This user has no home folder.
            return None

    def run_task(self, task: str, *, timeout: float) -> TaskResult:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "result.json"
            command = [sys.executable, "-m", "hf_rocm.tools.doctor.child", task, str(file)]
            # files in the working directory must not be imported as modules, and the child needs this process's
            # import path
            path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path if entry)
            ran = _run(command, timeout, environment={**self.environment, "PYTHONPATH": path}, folder=folder)
            return read_result(self.text(str(file)), ran)


def read_result(text: str | None, ran: CommandResult) -> TaskResult:
    """Return the facts that the child wrote before it ended, and its error."""
    try:
        written: dict[str, Any] = json.loads(text or "{}")
    except ValueError:
        # The child was killed while it was writing.
        written = {}
    facts, stage, error = written.get("facts", {}), str(written.get("stage", "start")), written.get("error")
    if ran.code is None:
        error = "it timed out"
    elif ran.code < 0:
        error = f"it was killed by signal {-ran.code}"
    elif ran.code and not error:
        error = (ran.err.strip().splitlines() or [f"exit code {ran.code}"])[-1]
    return TaskResult(facts, error, stage if error else "")


def _run(
    command: list[str], timeout: float, *, environment: Mapping[str, str] | None = None, folder: str | None = None
) -> CommandResult:
    try:
        result = subprocess.run(
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
        return CommandResult(None)
    except OSError as error:
        return CommandResult(127, err=str(error))
    return CommandResult(result.returncode, result.stdout, result.stderr)


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
