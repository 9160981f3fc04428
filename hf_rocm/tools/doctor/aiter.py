"""The installed aiter: its cache of compiled modules, its tables of tuned GEMMs, and whether it can be imported."""

from __future__ import annotations

import csv
import io
from collections import Counter

from hf_rocm.tools.doctor.facts import Aiter, JitCache
from hf_rocm.tools.doctor.machine import Machine

IMPORT_SECONDS = 120.0
# The module that `import aiter` needs (its name depends on the release). Without it, the import starts a compiler.
CORE = ("module_aiter_core", "module_aiter_enum")
TABLES = ("bf16_tuned_gemm.csv", "tuned_gemm.csv")
# Compute units → architecture, for tables that contain only the number of compute units.
UNITS = {"304": "gfx942", "80": "gfx942", "256": "gfx950"}


def collect(machine: Machine) -> Aiter:
    package = machine.aiter()
    if package.path is None or not package.amd:
        return Aiter(package)
    cache = _cache(machine, package.path)
    built = any(name.startswith(CORE) for name in cache.modules)
    # aiter is imported only if its core module is already compiled: a build that is killed at the timeout would leave
    # locks behind.
    result = machine.run_task("aiter", timeout=IMPORT_SECONDS) if built else None
    return Aiter(
        package,
        cache=cache,
        installed=_modified(machine, f"{package.path}/__init__.py"),
        torch_installed=_modified(machine, f"{machine.torch().path}/version.py"),
        rows=_rows(machine, package.path),
        result=result,
    )


def _cache(machine: Machine, package: str) -> JitCache:
    """Return aiter's cache: AITER_JIT_DIR, the package's folder if it is writable, or else a folder in $HOME."""
    environment = machine.environment
    named, own = environment.get("AITER_JIT_DIR", ""), f"{package}/jit"
    home = f"{environment.get('HOME', '')}/.aiter/jit"
    node = machine.look(own)
    folder = named or (own if node is not None and node.writable else home)
    node = machine.look(folder)
    writable = node.writable if node else _creatable(machine, folder)
    return JitCache(
        folder,
        writable,
        modules={
            name: _modified(machine, f"{folder}/{name}") for name in machine.names(folder) if name.endswith(".so")
        },
        locks={
            name: _modified(machine, f"{folder}/build/{name}")
            for name in machine.names(f"{folder}/build")
            if name.startswith("lock_") or name.endswith(".lock")
        },
    )


def _creatable(machine: Machine, folder: str) -> bool:
    """Return whether the nearest existing parent folder is writable."""
    while "/" in folder.rstrip("/"):
        folder = folder.rstrip("/").rsplit("/", 1)[0] or "/"
        node = machine.look(folder)
        if node is not None:
            return node.writable
        if folder == "/":
            break
    return False


def _rows(machine: Machine, package: str) -> dict[str, int]:
    """Return the number of tuned GEMMs per architecture in aiter's own tables."""
    counted: Counter[str] = Counter()
    for name in TABLES:
        text = machine.text(f"{package}/configs/{name}")
        for row in csv.DictReader(io.StringIO(text or "")):
            counted[row.get("gfx") or UNITS.get(row.get("cu_num") or "", "another GPU")] += 1
    return dict(counted)


def _modified(machine: Machine, path: str) -> float:
    node = machine.look(path)
    return node.modified if node else 0.0
