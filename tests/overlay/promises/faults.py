"""Faults of the system itself: strace makes a chosen call of a command fail, or kills the command there."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hf_rocm.overlay import catalog
from tests.overlay.promises.injected import BEGIN, IDLE

# more calls than the parent makes while it imports what the children need: see `injected`
LEAD = {"newfstatat": 1700, "fstat": 1700, "openat": 1000, "read": 1000, "close": 1000, "getdents64": 500}
FEW = 200
NO_FILES = {"mmap", "ioctl", "fcntl", "dup", "lseek"}  # on descriptors that are open already, without the disk
DRIVER = Path(__file__).with_name("injected.py")
_LINE = re.compile(r"^(\d+) +([a-z0-9_]+)\(")

ERRORS = ("ENOSPC", "EACCES", "EROFS", "EIO")
SIGNALS = ("KILL", "INT", "TERM")


@dataclass(frozen=True)
class Call:
    """One system call of a command: its name, and which of that name it is."""

    name: str
    number: int


def require_injection() -> None:
    """Fail, never skip: a suite that can't inject faults proves nothing about them."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.fail("these tests inject faults with strace, which is not installed: apt-get install strace")
    command = [strace, "-f", "-qq", "-o", os.devnull, "-e", "trace=access", "-e", "inject=access:error=EIO:when=1+"]
    probe = "import os, sys; sys.exit(0 if not os.access('/', os.F_OK) else 9)"
    done = subprocess.run([*command, sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"strace can't inject faults here (is ptrace allowed?): {done.stderr.strip()}")


def calls_of(command: str, site: Path, models: Sequence[str], scratch: Path) -> list[Call]:
    """Every call on this site, in a run that nothing disturbs."""
    log = scratch / "trace"
    (status,) = _run(["-y", "-o", str(log), "-e", "trace=%file,%desc"], command, None, [(0, site)], models, scratch)
    assert status == 0, status
    counts: dict[str, int] = {}
    found, child = [], ""
    for line in log.read_text(errors="replace").splitlines():
        matched = _LINE.match(line)
        if matched is None:
            continue
        process, name = matched.groups()
        if BEGIN in line:
            child, counts = process, {}
        elif process == child:
            counts[name] = counts.get(name, 0) + 1
            if str(site) in line:
                found.append(Call(name, counts[name]))
    unknown = {call.name for call in found} - IDLE.keys() - NO_FILES
    assert not unknown, f"injected.IDLE lacks {unknown}"
    return [call for call in found if call.name in IDLE]


def strike(
    fault: str, command: str, name: str, places: Iterable[tuple[int, Path]], models: Sequence[str], scratch: Path
) -> list[int]:
    """Run the command once on each site, with the fault at its call number `place` of this name."""
    what = f"signal={fault}" if fault in SIGNALS else f"error={fault}"
    # strace stops at this call alone with a filter in the kernel; it delivers no signals then
    quick = [] if fault in SIGNALS else ["--seccomp-bpf"]
    options = [
        *quick,
        "-o",
        os.devnull,
        "-e",
        f"trace={name}",
        "-e",
        f"inject={name}:{what}:when={LEAD.get(name, FEW)}",
    ]
    return _run(options, command, name, list(places), models, scratch)


def _run(
    options: Sequence[str],
    command: str,
    name: str | None,
    places: Sequence[tuple[int, Path]],
    models: Sequence[str],
    scratch: Path,
) -> list[int]:
    order = scratch / "order.json"
    order.write_text(
        json.dumps(
            {
                "command": command,
                "call": name,
                "lead": LEAD.get(name or "", FEW),
                "models": list(models),
                "overlays": str(_overlays(models, scratch / "overlays")),
                "places": [(place, str(site)) for place, site in places],
            }
        )
    )
    done = subprocess.run(
        ["strace", "-f", "-qq", *options, sys.executable, "-S", str(DRIVER), str(order)],
        env={**os.environ, "PYTHONPATH": _path()},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    statuses = json.loads(done.stdout.splitlines()[-1])
    assert len(statuses) == len(places)
    return statuses


def _overlays(models: Sequence[str], root: Path) -> Path:
    """Those of these models alone: reading all of them takes more calls than a driver may make."""
    if not root.exists():
        for directory in catalog.load().directories:
            for model in set(models) & directory.files.keys():
                shutil.copytree(directory.files[model].parent, root / directory.name / "models" / model)
            if (root / directory.name).exists():
                shutil.copy(directory.path / "manifest.toml", root / directory.name)
    return root


def _path() -> str:
    """Where the driver finds what it imports: the fewer places, the fewer calls before the children."""
    found = (importlib.util.find_spec(name) for name in ("hf_rocm", "packaging", "tomli"))
    return os.pathsep.join(dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in found if spec and spec.origin))
