"""First-use checks: a kernel runs a small call of the same kind, and its result is compared with the eager tier's.

A kernel may take minutes to build, and may hang or crash, so the check runs in a child process with a time-out. Passed
checks are stored on disk for this GPU, its driver and the installed releases (`probe_cache`). A failed check
disables the kernel in this process for calls with the same `terms` (dtypes, biases and gradients), with one warning;
other calls have their own check. Processes that need the same check at the same time run it once (`probe_lock`). If the
disk or the temporary folder is not available, the check runs without it; if no process can be started, the kernel is
disabled.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from hf_rocm import __version__, options
from hf_rocm.device import Device
from hf_rocm.ops import probe_cache, probe_cases, probe_lock, probe_worker

Probe = Callable[[Any, Device], "str | None"]

# operation, tier, name and terms
_Kernel = tuple[str, str, str, str]

# Fields of specifications, and the words for them in `terms`.
_EXTRA = {"bias": "biases", "grad": "gradients"}

_off: dict[_Kernel, str] = {}
_passed: set[str] = set()


def checked(operation: str, name: str, *, tier: str = "aiter", version: Callable[[], str] | None = None) -> Probe:
    """The probe of an implementation, in a child process.

    version: a function that returns the release of the package, which is part of the key on disk.
    """

    def probe(spec: Any, device: Device) -> str | None:
        kind = probe_cases.kind(operation, spec)
        key = _key(operation, tier, name, kind, device, version() if version else "")
        return _once(
            (operation, tier, name, terms(spec)),
            key,
            lambda: probe_worker.send(
                probe_worker.request(operation, tier, name, kind), options.current().probe_timeout
            ),
            on_disk=True,
        )

    return probe


def checked_here(operation: str, name: str, *, tier: str) -> Probe:
    """The probe of an implementation, in this process: without a child, a time-out or results on disk."""

    def probe(spec: Any, device: Device) -> str | None:
        kind = probe_cases.kind(operation, spec)
        key = _key(operation, tier, name, kind, device, "")
        return _once(
            (operation, tier, name, terms(spec)),
            key,
            lambda: probe_cases.check(operation, tier, name, kind),
            on_disk=False,
        )

    return probe


def ahead(device: torch.device | None = None) -> None:
    """Start the child early if no passed check is stored or `refresh` is set, so that it starts while a model loads.

    Does nothing if checks are switched off or there is no GPU.

    device: the device of the model's weights once they are loaded; the child then initialises that GPU. Among the ranks
    of a machine, only the first one starts its child early.
    """
    current = options.current()
    if not _first_of_machine():
        return
    if current.probe and torch.cuda.is_available() and (current.refresh or probe_cache.is_empty()):
        # The process may fail to start, for example for lack of memory; a later check reports this.
        with suppress(OSError, ValueError):
            probe_worker.start(device if device is not None and device.type == "cuda" else None)


def _first_of_machine() -> bool:
    """Whether this process is the first rank of this machine, or not part of a distributed job."""
    launcher, distributed = options.launcher(), torch.distributed
    grouped = distributed.is_available() and distributed.is_initialized()
    rank = str(distributed.get_rank()) if grouped else launcher.get("RANK", "0")
    return launcher.get("LOCAL_RANK", rank) == "0"


def terms(spec: Any) -> str:
    """The calls to which a failed check applies, in words: the dtypes of a specification, biases and gradients."""
    dtypes = dict.fromkeys(str(value).removeprefix("torch.") for value in spec if isinstance(value, torch.dtype))
    extra = [words for field, words in _EXTRA.items() if getattr(spec, field, False)]
    return " and ".join(dtypes) + (f" with {' and '.join(extra)}" if extra else "")


def failed(operation: str, tier: str, name: str, dtype: torch.dtype) -> str | None:
    """Why this process has disabled a kernel for calls without gradients on tensors of this dtype, or None.

    One failed check with this dtype is enough, whatever the dtypes of the other tensors were.
    """
    word = str(dtype).removeprefix("torch.")
    for (*kernel, calls), reason in _off.items():
        if kernel == [operation, tier, name] and word in calls.split() and "gradients" not in calls:
            return reason
    return None


def forget() -> None:
    """Drop the results of this process's checks, so that they run again. Results on disk are kept."""
    _off.clear()
    _passed.clear()


def _once(kernel: _Kernel, key: str, check: Callable[[], str | None], *, on_disk: bool) -> str | None:
    if kernel in _off:
        return _off[kernel]
    if key in _passed:
        return None
    if not on_disk or options.current().refresh or probe_cache.passed(key) is None:
        reason = _in_turn(kernel, key, check) if on_disk else check()
        if reason is not None:
            operation, tier, name, calls = kernel
            _off[kernel] = f"its check failed: {reason}"
            warnings.warn(
                f"hf_rocm: {operation} won't use {tier}'s {name} for {calls} in this process: {reason}",
                RuntimeWarning,
                stacklevel=2,
            )
            return _off[kernel]
    _passed.add(key)
    return None


def _in_turn(kernel: _Kernel, key: str, check: Callable[[], str | None]) -> str | None:
    """Check a kernel, and share the result with all processes that wait for it, such as the ranks of a job."""
    current, start = options.current(), time.time()
    label = f"{kernel[1]}'s {kernel[2]}"
    with probe_lock.turn(probe_cache.lock(key), timeout=current.probe_timeout, kernel=label) as this_turn:
        if this_turn.failure is not None:
            return this_turn.failure
        passed = probe_cache.passed(key)
        if passed is not None and (not current.refresh or (this_turn.waited and passed >= start)):
            return None
        reason = check()
        if reason is None:
            probe_cache.record(key)
        else:
            this_turn.fail(reason)
        return reason


def _key(operation: str, tier: str, name: str, kind: tuple[Any, ...], device: Device, version: str) -> str:
    return probe_cache.key(
        operation=operation,
        kernel=f"{tier}/{name}",
        kind=probe_worker.encode(kind),
        arch=device.arch,
        units=device.units,
        version=version,
        torch=torch.__version__,
        rocm=torch.version.hip,
        # The tuned tables determine the kernel of a GEMM.
        tables=options.tuned_tables(),
        hf_rocm=__version__,
    )
