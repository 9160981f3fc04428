"""Whether AMD's aiter is installed and can be imported, determined once per process.

`aiter` on PyPI is an unrelated package; AMD's package is `amd-aiter`. They are distinguished by their files. Importing
AMD's package runs executables and may compile code, and without ROCm it raises RuntimeError. So it is imported lazily
and only once, even if the import fails.
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
from hf_rocm.architectures import NEWEST_AITER
from hf_rocm.architectures import RADEON as RADEON
from hf_rocm.device import Device
from hf_rocm.ops import probe
from hf_rocm.ops.aiter.tables.active import before_import
from hf_rocm.ops.probe import Probe
from hf_rocm.overlay.facts import aiter_facts

RADEON_SINCE = "0.1.19"


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
    """The imported aiter. operator and function look up a name; they return None if it doesn't exist.

    operator: a torch operator (`torch.ops.aiter.…`); function: a plain Python function of the package, or
    `submodule:name`, which is also None if the submodule can't be imported. version: None if the package has no
    metadata or no valid version; it then counts as older than every release. bound: the cache of `contract`.
    """

    version: Version | None
    operator: Callable[[str], Function | None]
    function: Callable[[str], Function | None]
    bound: dict[tuple[str, str, frozenset[str]], Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"amd-aiter {self.version}" if self.version else "this amd-aiter"

    @property
    def unchecked(self) -> bool:
        """Whether this release is newer than those that hf_rocm was checked with. The local version part is ignored."""
        return self.version is not None and Version(self.version.public) > Version(NEWEST_AITER)

    def at_least(self, version: str) -> bool:
        return self.version is not None and self.version >= Version(version)


def unavailable(device: Device, *, portable: bool = False) -> str | None:
    """Why no kernel of aiter can serve this device, or None. Imports aiter unless the device rules it out.

    portable: whether the kernel is plain HIP or Triton, so that Radeon GPUs may run it too.
    """
    if not device.rocm:
        return f"aiter needs an AMD GPU under ROCm, but this is {_plain(device)}"
    radeon = portable and device.arch in RADEON
    if device.arch not in INSTINCT and not radeon:
        known = ", ".join(INSTINCT + RADEON if portable else INSTINCT)
        return f"this kernel of aiter is for {known}, not for {device.arch}"
    loaded = load()
    if isinstance(loaded, str):
        return loaded
    if loaded.unchecked and not _named():
        return (
            f"{loaded.name} is newer than {NEWEST_AITER}, the last release that hf_rocm's calls were checked with "
            "(to use it anyway, set HF_ROCM_TIER=aiter, or USE_AITER_ATTENTION, _GEMM or _MOE to 1)"
        )
    if radeon and not loaded.at_least(RADEON_SINCE):
        return f"aiter supports {device.arch} from {RADEON_SINCE} on, but this is {loaded.name}"
    return None


def _named() -> bool:
    """Whether the user requested aiter for any operation."""
    current = options.current()
    return "aiter" in current.tiers.values() or options.Switch.REQUIRED in current.aiter.values()


def checked(operation: str, name: str) -> Probe:
    """The probe of an aiter kernel. Its result is valid for the installed release."""
    return probe.checked(operation, name, tier="aiter", version=lambda: str(release().version))


def release() -> Release:
    """The imported aiter. Call it only after `unavailable` has returned None."""
    loaded = load()
    assert isinstance(loaded, Release)
    return loaded


@cache
def load() -> Release | str:
    """Import aiter, once. Returns the release, or the reason (a sentence) why it can't be used."""
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
        # This import registers gemm_a16w16.
        importlib.import_module("aiter.tuned_gemm")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - modules may raise any error, and a failed build exits
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
    schema = overload._schema.arguments
    return Function(overload, tuple(Argument(argument.name, not argument.has_default_value()) for argument in schema))


def _function(package: object, name: str) -> Function | None:
    submodule, _, name = name.rpartition(":")
    if submodule:
        try:
            package = importlib.import_module(f"aiter.{submodule}")
        except (Exception, SystemExit):  # noqa: BLE001 - absent in this release, or not importable with this Triton
            return None
        _mend_registrations()
    function = getattr(package, name, None)
    if function is None:
        return None
    empty = inspect.Parameter.empty
    parameters = inspect.signature(function).parameters.values()
    return Function(function, tuple(Argument(parameter.name, parameter.default is empty) for parameter in parameters))


def _tidy(before: list[str]) -> None:
    """Move the folders that aiter inserted into sys.path to the end of sys.path.

    Their modules have very common names and would shadow others. The folders are not removed, because aiter's builds
    import from them later.
    """
    added = [entry for entry in sys.path if entry not in before]
    sys.path[:] = [entry for entry in sys.path if entry in before] + added


def _mend_registrations() -> None:
    """Remove the names `aiter::aiter::…` that releases of 2025 register: they cause errors at exit in torch 2.13."""
    for module in ("torch_guard", "aiter.jit.utils.torch_guard"):
        library = getattr(sys.modules.get(module), "aiter_lib", None)
        names = getattr(library, "_op_defs", None)
        if isinstance(names, set):
            names.difference_update([operator for operator in names if operator.count("::") > 1])


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
    return "the CPU" if device.kind == "cpu" else f"a {device.kind} device without ROCm"
