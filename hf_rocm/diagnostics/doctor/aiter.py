"""aiter as it lies on disk: its cache of compiled modules, its tuned table, and whether importing it is worth a try."""

from __future__ import annotations

import csv
import io
from collections import Counter

from hf_rocm.diagnostics.doctor.facts import Aiter, JitCache
from hf_rocm.diagnostics.doctor.machine import Machine

IMPORT_SECONDS = 120.0
# the module that `import aiter` itself needs, by release; without it the import starts a compiler
CORE = ("module_aiter_core", "module_aiter_enum")
TABLES = ("bf16_tuned_gemm.csv", "tuned_gemm.csv")
# what tells GPUs apart in tables that name only their compute units
UNITS = {"304": "gfx942", "80": "gfx942", "256": "gfx950"}


def collect(machine: Machine) -> Aiter:
    found = machine.aiter()
    if found.path is None or not found.amd:
        return Aiter(found)
    cache = _cache(machine, found.path)
    built = any(name.startswith(CORE) for name in cache.modules)
    # killed in the middle of a build it would leave locks behind, so it is imported only where nothing is to be built
    answer = machine.ask("aiter", timeout=IMPORT_SECONDS) if built else None
    return Aiter(
        found,
        cache=cache,
        installed=_modified(machine, f"{found.path}/__init__.py"),
        torch_installed=_modified(machine, f"{machine.torch().path}/version.py"),
        rows=_rows(machine, found.path),
        answer=answer,
    )


def _cache(machine: Machine, package: str) -> JitCache:
    """AITER_JIT_DIR, else the package's own folder if it can be written to, else one in the home: aiter's own order."""
    environment = machine.environment
    named, own = environment.get("AITER_JIT_DIR", ""), f"{package}/jit"
    home = f"{environment.get('HOME', '')}/.aiter/jit"
    node = machine.look(own)
    folder = named or (own if node is not None and node.writable else home)
    here = machine.look(folder)
    writable = here.writable if here else _creatable(machine, folder)
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
    """Whether the nearest folder above that is there can be written to."""
    while "/" in folder.rstrip("/"):
        folder = folder.rstrip("/").rsplit("/", 1)[0] or "/"
        node = machine.look(folder)
        if node is not None:
            return node.writable
        if folder == "/":
            break
    return False


def _rows(machine: Machine, package: str) -> dict[str, int]:
    """How many products the shipped table has tuned for each architecture."""
    counted: Counter[str] = Counter()
    for name in TABLES:
        text = machine.text(f"{package}/configs/{name}")
        for row in csv.DictReader(io.StringIO(text or "")):
            counted[row.get("gfx") or UNITS.get(row.get("cu_num") or "", "another GPU")] += 1
    return dict(counted)


def _modified(machine: Machine, path: str) -> float:
    node = machine.look(path)
    return node.modified if node else 0.0
