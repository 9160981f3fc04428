"""Every option, and the only reader of the environment.

An option is an environment variable and, where that makes sense, an argument; arguments win. Where no overlay
is active, all are ignored. The table in the README is generated from `VARIABLES`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from hf_rocm.errors import OptionError

# In order of preference; `user` is what users register themselves.
TIERS = ("user", "aiter", "triton", "torch", "eager")
OPERATIONS = ("attention", "linear", "act_and_mul", "rms_norm", "rope")


class Switch(Enum):
    """A tri-state: auto (unset), required (1: an error that says why if it can't be), off (0)."""

    AUTO = "auto"
    REQUIRED = "1"
    OFF = "0"


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, values and meaning, as the README shows them."""

    name: str
    values: str
    meaning: str


VARIABLES = (
    Variable("HF_ROCM_FORCE", "0, 1", "switch the ROCm path on without ROCm, for tests and measurement"),
    Variable(
        "HF_ROCM_TIER",
        "aiter, triton, torch, eager, user; or per op: attention=torch,linear=eager",
        "the named tier must work, or the call raises with every reason",
    ),
    Variable(
        "HF_ROCM_PROBE",
        "0, 1, refresh",
        "check a kernel against the eager tier before its first use (default 1); refresh: though it passed before",
    ),
    Variable("HF_ROCM_PROBE_TIMEOUT", "seconds", "how long a kernel may take to build and be checked (default 900)"),
    Variable("HF_ROCM_CACHE", "a folder", "where passed checks are remembered (default ~/.cache/hf_rocm)"),
    Variable("USE_AITER_ATTENTION", "unset, 0, 1", "attention through aiter: auto, never, or required"),
    Variable("USE_AITER_GEMM", "unset, 0, 1", "linear layers through aiter: auto, never, or required"),
    Variable("USE_OPTIMIZED_OPS", "unset, 0, 1", "activation, norm and rope through aiter: auto, never, or required"),
    Variable("FORCE_EAGER_ATTENTION", "0, 1", "attention in plain PyTorch (the same as HF_ROCM_TIER=attention=eager)"),
)


@dataclass(frozen=True)
class Options:
    """The options that steer running models, checked when built."""

    tiers: Mapping[str, str]
    aiter: Mapping[str, Switch]
    probe: bool = True
    refresh: bool = False
    probe_timeout: float = 900.0

    def tier(self, operation: str) -> str | None:
        """The tier that the user named for this operation, or None."""
        return self.tiers.get(operation)


def force_requested() -> bool:
    """Whether `HF_ROCM_FORCE` asks for the ROCm path on any machine."""
    return _flag(os.environ, "HF_ROCM_FORCE", default=False)


def aiter_may_log() -> bool:
    """Whether one of aiter's own variables asks it to speak; else hf_rocm lets only its warnings through."""
    return bool(os.environ.get("AITER_LOG_LEVEL")) or os.environ.get("AITER_LOG_MORE", "0") not in ("", "0")


def cache_folder() -> Path:
    """Where what was found out about this machine is kept."""
    named = os.environ.get("HF_ROCM_CACHE", "").strip()
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return Path(named) if named else (Path(base) if base else Path.home() / ".cache") / "hf_rocm"


def tuned_tables() -> list[tuple[str, int]]:
    """The tables of tuned products that aiter is told to use, each with when it was last written (ns)."""
    paths = [Path(each) for each in os.environ.get("AITER_CONFIG_GEMM_BF16", "").split(os.pathsep) if each]
    return [(str(path), path.stat().st_mtime_ns if path.is_file() else 0) for path in paths]


def current() -> Options:
    """The options in force: an `override`, else the environment as it was at the first call."""
    return _overrides[-1] if _overrides else _from_environment()


@contextmanager
def override(**changes: Any) -> Iterator[Options]:
    """Replace options within a block: `tiers={"attention": "eager"}` or `tier="torch"` for every operation."""
    if "tier" in changes:
        changes["tiers"] = _parse_tiers(changes.pop("tier"), source="tier=")
    _overrides.append(replace(current(), **changes))
    _forget_choices()
    try:
        yield _overrides[-1]
    finally:
        _overrides.pop()
        _forget_choices()


def parse(environment: Mapping[str, str]) -> Options:
    """Read options from a mapping. Raises `OptionError` naming the variable, its value and what is allowed."""
    tiers = _parse_tiers(environment.get("HF_ROCM_TIER", ""), source="HF_ROCM_TIER=")
    if _flag(environment, "FORCE_EAGER_ATTENTION", default=False):
        named = tiers.setdefault("attention", "eager")
        if named != "eager":
            raise OptionError(
                "FORCE_EAGER_ATTENTION=1 contradicts HF_ROCM_TIER",
                facts={"HF_ROCM_TIER": environment["HF_ROCM_TIER"]},
                hint="unset one of the two",
            )
    optimized = _switch(environment, "USE_OPTIMIZED_OPS")
    aiter = {
        "attention": _switch(environment, "USE_AITER_ATTENTION"),
        "linear": _switch(environment, "USE_AITER_GEMM"),
        "act_and_mul": optimized,
        "rms_norm": optimized,
        "rope": optimized,
    }
    refresh = environment.get("HF_ROCM_PROBE", "").strip() == "refresh"
    return Options(
        tiers,
        aiter,
        probe=refresh or _flag(environment, "HF_ROCM_PROBE", default=True),
        refresh=refresh,
        probe_timeout=_seconds(environment, "HF_ROCM_PROBE_TIMEOUT", default=900.0),
    )


_overrides: list[Options] = []


@cache
def _from_environment() -> Options:
    return parse(os.environ)


def _forget_choices() -> None:
    """Choices are cached per specification; they are void once the options change."""
    import sys

    registry = sys.modules.get("hf_rocm.ops.registry")
    if registry is not None:
        registry.forget_choices()


def _parse_tiers(text: str, *, source: str) -> dict[str, str]:
    text = text.strip()
    if not text or text == "auto":
        return {}
    if text in TIERS:
        return dict.fromkeys(OPERATIONS, text)
    tiers = {}
    for part in text.split(","):
        operation, _, tier = (piece.strip() for piece in part.partition("="))
        if operation not in OPERATIONS or tier not in TIERS:
            raise OptionError(
                f"{source}{text} is not understood at {part.strip()!r}",
                facts={"tiers": ", ".join(TIERS), "operations": ", ".join(OPERATIONS)},
                hint="name one tier for all, or pairs such as attention=torch,linear=eager",
            )
        tiers[operation] = tier
    return tiers


def _flag(environment: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = environment.get(name, "").strip()
    if text in ("0", "1"):
        return text == "1"
    if text:
        raise OptionError(f"{name}={text} is not understood", facts={"allowed": "0, 1, or unset"})
    return default


def _seconds(environment: Mapping[str, str], name: str, *, default: float) -> float:
    text = environment.get(name, "").strip()
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise OptionError(f"{name}={text} is not understood", facts={"allowed": "a positive number of seconds"})
    return seconds


def _switch(environment: Mapping[str, str], name: str) -> Switch:
    text = environment.get(name, "").strip()
    if text in ("", "auto"):
        return Switch.AUTO
    try:
        return Switch(text)
    except ValueError:
        raise OptionError(f"{name}={text} is not understood", facts={"allowed": "0, 1, or unset"}) from None
