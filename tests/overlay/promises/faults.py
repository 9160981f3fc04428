"""Faults of the operating system: strace makes a command's system call fail, or sends a signal at that call."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hf_rocm.overlay import catalog
from tests.overlay.promises.injected import BEGIN, IDLE, READY

# More than the number of calls of one name that the parent makes after strace has attached (see injected.py).
FEW = 16
# Calls on open descriptors that don't access the disk.
NO_FILES = {"mmap", "ioctl", "fcntl", "dup", "lseek"}
DRIVER = Path(__file__).with_name("injected.py")
# The time limit in seconds for all runs with a fault at a call of one name.
TIMEOUT = 300
_LINE = re.compile(r"^(\d+) +([a-z0-9_]+)\(")

ERRORS = ("ENOSPC", "EACCES", "EROFS", "EIO")
SIGNALS = ("KILL", "INT", "TERM")


@dataclass(frozen=True)
class Call:
    """One system call of a command: its name, and its number among the calls of that name."""

    name: str
    number: int


def require_injection() -> None:
    """Fail instead of skipping, because the suite proves nothing without fault injection."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.fail("these tests inject faults with strace, which is not installed: apt-get install strace")
    command = [strace, "-f", "-qq", "-o", os.devnull, "-e", "trace=access", "-e", "inject=access:error=EIO:when=1+"]
    probe = "import os, sys; sys.exit(0 if not os.access('/', os.F_OK) else 9)"
    result = subprocess.run([*command, sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.fail(f"strace can't inject faults here (is ptrace allowed?): {result.stderr.strip()}")


class Driver:
    """A process that has imported the installer and runs a command repeatedly, with or without a fault."""

    def __init__(self, command: str, models: Sequence[str], scratch: Path) -> None:
        self.command, self.models = command, models
        self.overlays = _overlays(models, scratch / "overlays")
        self.trace, self.errors = scratch / "trace", scratch / "errors"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-S", str(DRIVER)],
                env={**os.environ, "PYTHONPATH": _path()},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def calls(self, site: Path) -> list[Call]:
        """All system calls that access files of this site in a run without faults, except those in NO_FILES."""
        (status,) = self._run(None, 0, [(0, site)], ["-y", "-o", str(self.trace), "-e", "trace=%file,%desc"])
        assert status == 0, status
        counts: dict[str, int] = {}
        results, child = [], ""
        for line in self.trace.read_text(errors="replace").splitlines():
            matched = _LINE.match(line)
            if matched is None:
                continue
            process, name = matched.groups()
            if BEGIN in line:
                child, counts = process, {}
            elif process == child:
                counts[name] = counts.get(name, 0) + 1
                if str(site) in line:
                    results.append(Call(name, counts[name]))
        unknown = {call.name for call in results} - IDLE.keys() - NO_FILES
        assert not unknown, f"injected.IDLE lacks {unknown}"
        return [call for call in results if call.name in IDLE]

    def inject(self, fault: str, name: str, targets: Sequence[tuple[int, Path]]) -> list[int]:
        """Run the command once per (number, site), with the fault at the call of this name that has this number.

        strace attaches to a process that has already imported everything, so earlier calls are not counted. Returns the
        statuses of the runs, as returned by waitpid.
        """
        injection = f"signal={fault}" if fault in SIGNALS else f"error={fault}"
        lead = max(number for number, _ in targets) + FEW
        injected = ["-o", os.devnull, "-e", f"trace={name}", "-e", f"inject={name}:{injection}:when={lead}"]
        return self._run(name, lead, targets, injected)

    def _run(
        self, name: str | None, lead: int, targets: Sequence[tuple[int, Path]], options: Sequence[str]
    ) -> list[int]:
        request = {
            "command": self.command,
            "call": name,
            "lead": lead,
            "models": list(self.models),
            "overlays": str(self.overlays),
            "targets": [(number, str(site)) for number, site in targets],
        }
        ready, parent = self._exchange(json.dumps(request)).rsplit(maxsplit=1)
        assert ready == READY
        strace = subprocess.Popen(["strace", "-f", "-qq", *options, "-p", parent], stderr=subprocess.PIPE, text=True)
        try:
            while not _is_traced(int(parent)):
                assert strace.poll() is None, strace.communicate()[1]
                time.sleep(0.002)
            statuses: list[int] = json.loads(self._exchange("begin"))
            # strace exits with the last traced process.
            strace.wait(TIMEOUT)
        finally:
            strace.kill()
            strace.communicate()
        assert len(statuses) == len(targets)
        assert not self.errors.read_text(), self.errors.read_text()
        return statuses

    def _exchange(self, line: str) -> str:
        """Write a line and return the line that the process writes back."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        readable, _, _ = select.select([self.process.stdout], [], [], TIMEOUT)
        reply = self.process.stdout.readline() if readable else ""
        assert reply, f"no reply to {line}: {self.errors.read_text()}"
        return reply


def _is_traced(process: int) -> bool:
    return "\nTracerPid:\t0\n" not in Path(f"/proc/{process}/status").read_text()


def _overlays(models: Sequence[str], root: Path) -> Path:
    """Copy only the overlays of these models, because a child reads them all and strace slows down every call."""
    if not root.exists():
        for directory in catalog.load().directories:
            for model in set(models) & directory.files.keys():
                shutil.copytree(directory.files[model].parent, root / directory.name / "models" / model)
            if (root / directory.name).exists():
                shutil.copy(directory.path / "manifest.toml", root / directory.name)
    return root


def _path() -> str:
    """The value of PYTHONPATH for the driver."""
    result = (importlib.util.find_spec(name) for name in ("hf_rocm", "packaging", "tomli"))
    return os.pathsep.join(dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in result if spec and spec.origin))
