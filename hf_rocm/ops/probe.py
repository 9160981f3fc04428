"""First-use checks: a kernel computes a tiny case of the same kind and is compared with the eager tier.

Builds of minutes, hangs and crashes are possible then, so it happens in a child process with a time-out. What passed is
remembered on disk for this GPU and these versions; what failed is off for this process, with one warning. Processes
that come to the same check at once do it once, see `probe_turns`.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hf_rocm import __version__, options
from hf_rocm.device import Device
from hf_rocm.ops import probe_cases, probe_turns, probe_worker
from hf_rocm.ranks.environment import place

Probe = Callable[[Any, Device], "str | None"]

_off: dict[tuple[str, str, str], str] = {}
_passed: set[str] = set()


def checked(operation: str, name: str, *, tier: str = "aiter", version: Callable[[], str] | None = None) -> Probe:
    """The probe of an implementation, in a child process. version: the release of what it calls, for the memory."""

    def probe(spec: Any, device: Device) -> str | None:
        kind = probe_cases.kind(operation, spec)
        key = _key(operation, tier, name, kind, device, version() if version else "")
        return _once(
            (operation, tier, name),
            key,
            lambda: probe_worker.ask(
                probe_worker.request(operation, tier, name, kind), options.current().probe_timeout
            ),
            remember=True,
        )

    return probe


def checked_here(operation: str, name: str, *, tier: str, apart: Callable[[Any], str] | None = None) -> Probe:
    """The probe of an implementation that only this process knows: no child, no time-out, no memory on disk.

    apart: of a specification, a word; what fails with one word is off for that word alone.
    """

    def probe(spec: Any, device: Device) -> str | None:
        kind = probe_cases.kind(operation, spec)
        key = _key(operation, tier, name, kind, device, "")
        kernel = (operation, tier, name if apart is None else f"{name} for {apart(spec)}")
        return _once(kernel, key, lambda: probe_cases.check(operation, tier, name, kind), remember=False)

    return probe


def ahead(device: torch.device | None = None) -> None:
    """Start the child before the first check asks for it, where none has passed yet: it starts while a model loads.

    device: where the model's weights are, once they are there: the child then takes what it needs of that GPU. Of the
    ranks of one machine the first does: what it checks, the others take over.
    """
    current, here = options.current(), place()
    if here is not None and here.local != 0:
        return
    if current.probe and torch.cuda.is_available() and (current.refresh or not any(_folder().glob("*.json"))):
        with suppress(OSError, ValueError):  # no memory for a process, say: the check itself says so, if it comes to it
            probe_worker.start(device if device is not None and device.type == "cuda" else None)


def failed(operation: str, tier: str, name: str) -> str | None:
    """Why a kernel is off in this process, if a check of it has failed."""
    return _off.get((operation, tier, name))


def forget() -> None:
    """Check everything anew in this process; what is on disk stays."""
    _off.clear()
    _passed.clear()


def _once(kernel: tuple[str, str, str], key: str, check: Callable[[], str | None], *, remember: bool) -> str | None:
    if kernel in _off:
        return _off[kernel]
    if key in _passed:
        return None
    if not remember or options.current().refresh or not _file(key).is_file():
        reason = _in_turn(kernel, key, check) if remember else check()
        if reason is not None:
            operation, tier, name = kernel
            _off[kernel] = f"its check failed: {reason}"
            warnings.warn(
                f"hf_rocm: {operation} won't use {tier}'s {name} in this process: {reason}",
                RuntimeWarning,
                stacklevel=2,
            )
            return _off[kernel]
    _passed.add(key)
    return None


def _in_turn(kernel: tuple[str, str, str], key: str, check: Callable[[], str | None]) -> str | None:
    """Check a kernel for all processes of this machine that wait for it: the ranks of a job come at the same time."""
    current, began = options.current(), time.time()
    file = _file(key)
    lock = options.cache_folder() / "turns" / f"{file.stem}.lock"
    with probe_turns.turn(lock, timeout=current.probe_timeout, what=f"{kernel[1]}'s {kernel[2]}") as mine:
        if mine.found is not None:
            return mine.found
        if file.is_file() and (not current.refresh or (mine.waited and file.stat().st_mtime >= began)):
            return None
        reason = check()
        if reason is None:
            _remember(key)
        else:
            mine.fail(reason)
        return reason


def _key(operation: str, tier: str, name: str, kind: tuple[Any, ...], device: Device, version: str) -> str:
    facts = {
        "operation": operation,
        "kernel": f"{tier}/{name}",
        "kind": probe_worker.encode(kind),
        "arch": device.arch,
        "version": version,
        "torch": torch.__version__,
        "rocm": torch.version.hip,
        "tables": options.tuned_tables(),  # they choose the kernels of a product
        "hf_rocm": __version__,
    }
    return json.dumps(facts, sort_keys=True)


def _file(key: str) -> Path:
    return _folder() / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def _folder() -> Path:
    return options.cache_folder() / "probes"


def _remember(key: str) -> None:
    """One small file per pass, put in place whole: any number of processes may do it at once."""
    file = _file(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(key + "\n")
        Path(name).replace(file)
    except OSError:
        pass  # a home that can't be written: it is checked again by the next process
