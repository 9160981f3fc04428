"""Is AMD's aiter here, and does it import? Asked once, answered in a sentence.

`aiter` on PyPI is an unrelated package, AMD's is `amd-aiter`; the two are told apart by their files. Importing AMD's
runs executables and may compile, and without ROCm it raises RuntimeError, so it is imported lazily, once, and a
failure is kept.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from packaging.version import InvalidVersion, Version

from hf_rocm import options
from hf_rocm.architectures import INSTINCT as INSTINCT
from hf_rocm.architectures import RADEON as RADEON
from hf_rocm.device import Device
from hf_rocm.ops import probe
from hf_rocm.ops.probe import Probe
from hf_rocm.overlay.facts import aiter_facts
from hf_rocm.tuning.active import before_import

LISTS_RADEON = "0.1.19"


class Argument(NamedTuple):
    """One argument of a kernel as the installed release declares it."""

    name: str
    required: bool


class Function(NamedTuple):
    """A callable of aiter, with its arguments in order."""

    call: Callable[..., Any]
    arguments: tuple[Argument, ...]


@dataclass(eq=False)
class Release:
    """The aiter that was imported. operator and function look a name up, or give None.

    operator: a torch operator (`torch.ops.aiter.…`); function: a plain Python function of the package, or
    `submodule:name`.
    version is None where the package has no metadata; then it counts as older than any.
    """

    version: Version | None
    operator: Callable[[str], Function | None]
    function: Callable[[str], Function | None]
    bound: dict[tuple[str, str, frozenset[str]], Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"amd-aiter {self.version}" if self.version else "this amd-aiter"

    def at_least(self, version: str) -> bool:
        return self.version is not None and self.version >= Version(version)


def unavailable(device: Device, *, portable: bool = False) -> str | None:
    """Why no kernel of aiter can serve this device, or None. Imports aiter if everything else is in order.

    portable: it is a plain HIP or a Triton kernel, which Radeon may have too.
    """
    if not device.rocm:
        return f"aiter needs an AMD GPU under ROCm, and this is {_plain(device)}"
    radeon = portable and device.arch in RADEON
    if device.arch not in INSTINCT and not radeon:
        known = ", ".join(INSTINCT + RADEON if portable else INSTINCT)
        return f"this kernel of aiter is made for {known}, not for {device.arch}"
    loaded = load()
    if isinstance(loaded, str):
        return loaded
    if radeon and not loaded.at_least(LISTS_RADEON):
        return f"aiter knows {device.arch} from {LISTS_RADEON} on, and this is {loaded.name}"
    return None


def checked(operation: str, name: str) -> Probe:
    """The probe of a kernel of aiter: what it finds holds for the release that is installed."""
    return probe.checked(operation, name, tier="aiter", version=lambda: str(release().version))


def release() -> Release:
    """The imported aiter; only after `unavailable` has returned None."""
    loaded = load()
    assert isinstance(loaded, Release)
    return loaded


@cache
def load() -> Release | str:
    """Import aiter, once; why not, in a sentence, if it can't be."""
    facts = aiter_facts()
    if facts.path is None:
        return "aiter is not installed (scripts/install-aiter, or pip install amd-aiter)"
    if not facts.amd:
        return f"the installed package is not AMD's aiter: {facts.sentence}"
    name = f"amd-aiter {facts.version or '(version unknown)'}"
    path = list(sys.path)
    before_import()
    if not options.aiter_may_log():
        logging.getLogger("aiter").addFilter(_warnings_only)
    try:
        package = importlib.import_module("aiter")
        importlib.import_module("aiter.tuned_gemm")  # what registers gemm_a16w16
    except (Exception, SystemExit) as error:  # noqa: BLE001 - its modules raise anything, and a failed build exits
        options.use_tuned_table(None)
        return f"{name} can't be imported here: {type(error).__name__}: {_first_line(error)}"
    finally:
        _tidy(path)
        _mend_registrations()
    return Release(_version(facts.version), _operator, lambda function: _function(package, function))


def _operator(name: str) -> Function | None:
    try:
        overload = getattr(torch.ops.aiter, name).default
    except AttributeError:
        return None
    arguments = tuple(Argument(each.name, not each.has_default_value()) for each in overload._schema.arguments)
    return Function(overload, arguments)


def _function(package: object, name: str) -> Function | None:
    where, _, name = name.rpartition(":")
    if where:
        try:
            package = importlib.import_module(f"aiter.{where}")
        except (Exception, SystemExit):  # noqa: BLE001 - absent in this release, or not importable with this Triton
            return None
        _mend_registrations()
    found = getattr(package, name, None)
    if found is None:
        return None
    empty = inspect.Parameter.empty
    parameters = inspect.signature(found).parameters.values()
    return Function(found, tuple(Argument(each.name, each.default is empty) for each in parameters))


def _tidy(before: list[str]) -> None:
    """aiter puts its folders in front of sys.path, with modules of very common names. Its builds import from them
    later, so they stay, but at the end, where they shadow nobody's."""
    added = [entry for entry in sys.path if entry not in before]
    sys.path[:] = [entry for entry in sys.path if entry in before] + added


def _mend_registrations() -> None:
    """Releases of 2025 registered their operators as `aiter::aiter::…`, over which torch 2.13 stumbles at exit."""
    for module in ("torch_guard", "aiter.jit.utils.torch_guard"):
        library = getattr(sys.modules.get(module), "aiter_lib", None)
        names = getattr(library, "_op_defs", None)
        if isinstance(names, set):
            names.difference_update([each for each in names if each.count("::") > 1])


def _warnings_only(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


def _version(text: str | None) -> Version | None:
    try:
        return Version(text or "")
    except InvalidVersion:
        return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def _plain(device: Device) -> str:
    return "the CPU" if device.kind == "cpu" else f"a {device.kind} device without it"
