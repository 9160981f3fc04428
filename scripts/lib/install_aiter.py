"""scripts/install-aiter: install aiter for this machine's GPU and ROCm build of torch."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lib.console import ScriptError, echo, styled
from lib.environments import ROOT

RELEASE = "0.1.20.post1"
SOURCE = "git+https://github.com/ROCm/aiter.git"
BUILD_NEEDS = (
    "setuptools",
    "setuptools_scm",
    "wheel",
    "packaging",
    "psutil",
    "ninja",
    "pandas",
    "einops",
    "pybind11>=3.0.1",
    "flydsl==0.3.1",
)

PYPI = "0.1.7.post2.dev18"
PYPI_NEEDS = ("ninja", "pandas", "einops", "psutil", "packaging", "pybind11>=3.0.1")
PYPI_LIMITATIONS = (
    "it does not check whether a weight is shuffled (fixed in 0.1.7.post3)",
    "it never finds its table of tuned GEMMs, and its untuned GEMMs run in F.linear",
    "its attention has no sinks (added in 0.1.10), and drops a softcap on bf16 with head dim 128",
    "it has no (1 + w) norm (added in 0.1.17)",
    "hf_rocm does not use it on Radeon GPUs (aiter supports some of them from 0.1.19 on)",
)

SERVED = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201")
PINNED = ("torch", "triton", "pytorch-triton-rocm", "torchvision", "torchaudio", "numpy")


@dataclass(frozen=True)
class Machine:
    """The facts that determine whether and how aiter is installed.
    hip: the release of ROCm for which torch was built; aiter: the installed version of AMD's package.
    """

    torch: str | None
    hip: str | None
    arch: str | None
    hipcc: bool
    other_aiter: bool
    aiter: str | None


@dataclass(frozen=True)
class Plan:
    """Commands for `python -m pip`, their environment variables, and notes."""

    commands: tuple[tuple[str, ...], ...]
    variables: dict[str, str]
    notes: tuple[str, ...]


def plan(machine: Machine, *, release: str = RELEASE, pypi: bool = False) -> Plan:
    """Select what to install on this machine. Raises `ScriptError` if aiter cannot be used or installed."""
    if machine.torch is None or machine.hip is None:
        actual = "no torch" if machine.torch is None else f"torch {machine.torch}, which is not built for ROCm"
        raise ScriptError(
            f"aiter needs a ROCm build of PyTorch\n  found  {actual}\n\n"
            "hint: install torch for ROCm first, then run this again"
        )
    if machine.arch is None:
        raise ScriptError(
            "no AMD GPU was found\n\nhint: run this on the GPU machine, or pass its architecture: --arch gfx942"
        )
    if machine.arch not in SERVED:
        raise ScriptError(
            f"hf_rocm uses aiter's kernels only on {', '.join(SERVED)}\n  found  {machine.arch}\n\n"
            "hint: nothing has to be installed; the other tiers serve this GPU"
        )
    notes: list[str] = []
    commands: list[tuple[str, ...]] = []
    if machine.other_aiter:
        notes.append("the unrelated package `aiter` (asyncio) is installed and is removed first")
        commands.append(("uninstall", "--yes", "aiter"))
    if pypi:
        notes += [
            f"amd-aiter {PYPI} is the release on PyPI; compared with {RELEASE}:",
            *(f"  {limitation}" for limitation in PYPI_LIMITATIONS),
        ]
        commands.append(("install", *PYPI_NEEDS))
        commands.append(("install", "--no-deps", f"amd-aiter=={PYPI}"))
        return Plan(tuple(commands), {}, tuple(notes))
    if not machine.hipcc:
        raise ScriptError(
            "aiter compiles its kernels, but there is no hipcc on PATH\n\n"
            "hint: install ROCm's compiler (hip-dev or rocm-hip-sdk), or add /opt/rocm/bin to PATH"
        )
    if machine.aiter == PYPI:
        notes += [f"this replaces amd-aiter {PYPI} from PyPI:", *(f"  {limitation}" for limitation in PYPI_LIMITATIONS)]
    if machine.arch == "gfx90a":
        notes.append("AMD doesn't list gfx90a for aiter: every kernel is checked before its first use")
    notes += _unchecked(release)
    notes.append(
        "a kernel is compiled when it is first used, which takes minutes; `hf-rocm warmup MODEL` does this in advance"
    )
    commands.append(("install", *BUILD_NEEDS))
    commands.append(("install", "--no-build-isolation", "--no-deps", f"{SOURCE}@v{release}"))
    return Plan(tuple(commands), {"GPU_ARCHS": machine.arch}, tuple(notes))


def _unchecked(release: str) -> list[str]:
    """Return a list with a note if the release is newer than the newest checked one, else an empty list."""
    sys.path.append(str(ROOT))
    from packaging.version import Version

    from hf_rocm.architectures import NEWEST_AITER

    if Version(release) <= Version(NEWEST_AITER):
        return []
    return [f"{release} is newer than {NEWEST_AITER}, the last checked release: set HF_ROCM_TIER=aiter to use it"]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/install-aiter",
        description="Install AMD's aiter next to the ROCm PyTorch of this Python; torch and triton are not changed.",
    )
    parser.add_argument("--dry-run", action="store_true", help="show the commands without running them")
    parser.add_argument("--release", default=RELEASE, help=f"a release of github.com/ROCm/aiter (default {RELEASE})")
    parser.add_argument("--pypi", action="store_true", help=f"the old build on PyPI ({PYPI}); prints its limitations")
    parser.add_argument("--arch", help="the target GPU (default: the one in this machine)")
    options = parser.parse_args(arguments)
    machine = inspect_machine(options.arch)
    chosen = plan(machine, release=options.release, pypi=options.pypi)
    echo(f"torch {machine.torch}, ROCm {machine.hip}, {machine.arch}")
    for line in chosen.notes:
        echo(f"  {line}")
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{pin}\n" for pin in pins()), encoding="utf-8")
        for command in chosen.commands:
            constrained = ("--constraint", str(constraints)) if command[0] == "install" else ()
            shown = ["python", "-m", "pip", *command, *(("--constraint", "<what is installed>") if constrained else ())]
            prefix = [f"{name}={value}" for name, value in chosen.variables.items()]
            echo(styled(" ".join([*prefix, *shown]), "bold"))
            if not options.dry_run:
                _pip([*command, *constrained], chosen.variables)
    return 0


def inspect_machine(arch: str | None = None) -> Machine:
    """Inspect this machine without importing torch or aiter."""
    sys.path.append(str(ROOT))
    from hf_rocm.overlay.facts import aiter_facts, torch_facts

    torch, aiter = torch_facts(), aiter_facts()
    other = aiter.path is not None and not aiter.amd
    return Machine(
        torch=torch.version,
        hip=torch.hip,
        arch=arch or _arch(),
        hipcc=shutil.which("hipcc") is not None,
        other_aiter=other,
        aiter=aiter.version if aiter.amd else None,
    )


def pins() -> list[str]:
    """Pins for the installed packages that must not change: torch, Triton, torchvision, torchaudio and numpy."""
    pins_read = []
    for name in PINNED:
        try:
            pins_read.append(f"{name}=={version(name)}")
        except PackageNotFoundError:
            continue
    return pins_read


def _arch() -> str | None:
    tool = shutil.which("rocminfo") or "/opt/rocm/bin/rocminfo"
    if not Path(tool).exists():
        return None
    result = subprocess.run([tool], capture_output=True, text=True, check=False)
    matched = re.search(r"\bgfx[0-9a-f]{3,4}\b", result.stdout)
    return matched[0] if matched else None


def _pip(command: Sequence[str], variables: dict[str, str]) -> None:
    import os

    result = subprocess.run(
        [sys.executable, "-m", "pip", *command], env={**os.environ, **variables}, stdin=subprocess.DEVNULL, check=False
    )
    if result.returncode:
        raise ScriptError(f"pip failed\n  command  pip {' '.join(command)}\n  exit     {result.returncode}")
