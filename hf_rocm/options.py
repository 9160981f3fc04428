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
from typing import Any, NamedTuple

from hf_rocm.errors import OptionError

# In order of preference; `user` is what users register themselves.
TIERS = ("user", "aiter", "triton", "torch", "eager")
PRESHUFFLE = ("off", "auto", "all")
OPERATIONS = ("attention", "linear", "act_and_mul", "rms_norm", "rope", "experts")


class Switch(Enum):
    """A tri-state: auto (unset), required (1: an error that says why if it can't be), off (0)."""

    AUTO = "auto"
    REQUIRED = "1"
    OFF = "0"


class Variable(NamedTuple):
    """One environment variable: its name, values and meaning, as the README shows them."""

    name: str
    values: str
    meaning: str


VARIABLES = (
    Variable("HF_ROCM_FORCE", "0, 1", "switch the ROCm path on without ROCm, for tests and measurement"),
    Variable("HF_ROCM_AUTO", "0, 1", "models that plain transformers loads are prepared, where overlays are installed"),
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
    Variable("USE_AITER_MOE", "unset, 0, 1", "the experts of a mixture through aiter: auto, never, or required"),
    Variable("USE_OPTIMIZED_OPS", "unset, 0, 1", "activation, norm and rope through aiter: auto, never, or required"),
    Variable(
        "AITER_CONFIG_GEMM_BF16",
        "CSV files, separated by `:`",
        "tables of tuned products for aiter; merged with its own, these rows win, and the files are never written to",
    ),
    Variable(
        "HF_ROCM_PRESHUFFLE",
        "auto, all, off",
        "weights in the order of aiter's assembly kernels: where a gain is known (default), where they fit, or never",
    ),
    Variable(
        "HF_ROCM_PRESHUFFLE_BUDGET",
        "bytes, 4GiB, 25%",
        "how much memory shuffled copies may take; a share is of the model's weights (default 0: no copies)",
    ),
    Variable(
        "PRESHUFFLE_M_THRESH",
        "rows",
        "shuffled copies serve products of so many rows and up (default 128); 0: always, and the shuffled weight "
        "replaces the original; -1: never",
    ),
    Variable(
        "HF_ROCM_GRAPHS",
        "unset, 0, 1",
        "decode steps of prepared models in a recorded HIP graph: auto, never, or required",
    ),
    Variable(
        "HF_ROCM_GRAPHS_MEMORY",
        "bytes, 4GiB, 10%",
        "how much memory a model's caches may keep between two calls, with their recordings; a share is of the "
        "device's (default 10%; 0 keeps none)",
    ),
    Variable("FORCE_EAGER_ATTENTION", "0, 1", "attention in plain PyTorch (the same as HF_ROCM_TIER=attention=eager)"),
    Variable(
        "HF_ROCM_RANKS_TIMEOUT",
        "seconds",
        "how long a rank waits for the others before a model is loaded over several of them (default 300)",
    ),
)

# What torchrun, accelerate and others tell a process about its place among the ranks.
_LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
)


@dataclass(frozen=True)
class Options:
    """The options that steer running models, checked when built."""

    tiers: Mapping[str, str]
    aiter: Mapping[str, Switch]
    probe: bool = True
    refresh: bool = False
    probe_timeout: float = 900.0
    preshuffle: str = "auto"
    preshuffle_budget: str = "0"
    preshuffle_threshold: int = 128  # rows; 0 replaces the original, -1 shuffles nothing
    graphs: Switch = Switch.AUTO
    graphs_memory: str = "10%"
    ranks_timeout: float = 300.0

    def tier(self, operation: str) -> str | None:
        """The tier that the user named for this operation, or None."""
        return self.tiers.get(operation)


def force_requested() -> bool:
    """Whether `HF_ROCM_FORCE` asks for the ROCm path on any machine."""
    return _flag(os.environ, "HF_ROCM_FORCE", default=False)


def auto_requested() -> bool:
    """Whether `HF_ROCM_AUTO` asks for models that transformers loads to be prepared."""
    return _flag(os.environ, "HF_ROCM_AUTO", default=False)


def aiter_may_log() -> bool:
    """Whether one of aiter's own variables asks it to speak; else hf_rocm lets only its warnings through."""
    return bool(os.environ.get("AITER_LOG_LEVEL")) or os.environ.get("AITER_LOG_MORE", "0") not in ("", "0")


def triton_interprets() -> bool:
    """Whether Triton's own variable asks for its kernels to be interpreted, which needs no GPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def environment() -> dict[str, str]:
    """A copy of every variable, for those who report on the machine (`doctor`, `env`)."""
    return dict(os.environ)


def launcher() -> dict[str, str]:
    """What the launcher of this process says about its place among the ranks; empty where nobody launched any."""
    return {name: os.environ[name].strip() for name in _LAUNCHER if os.environ.get(name, "").strip()}


def set_variable(name: str, value: str | None) -> None:
    """Set a variable of this process and of its children; None: remove it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def cache_folder() -> Path:
    """Where what was found out about this machine is kept."""
    named = os.environ.get("HF_ROCM_CACHE", "").strip()
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return Path(named) if named else (Path(base) if base else Path.home() / ".cache") / "hf_rocm"


def tuned_tables() -> list[tuple[str, int]]:
    """The tables of tuned products that aiter is told to use, each with when it was last written (ns)."""
    paths = [Path(each) for each in os.environ.get("AITER_CONFIG_GEMM_BF16", "").split(os.pathsep) if each]
    return [(str(path), path.stat().st_mtime_ns if path.is_file() else 0) for path in paths]


def tuned_files() -> list[Path]:
    """The tables that the user named in AITER_CONFIG_GEMM_BF16, in order; hf_rocm never writes to them."""
    text = os.environ.get("AITER_CONFIG_GEMM_BF16", "") if _users_tables is None else _users_tables
    return [Path(each) for each in text.split(os.pathsep) if each]


def use_tuned_table(path: Path | None) -> None:
    """Point aiter, here and in child processes, at one table of ours; None: back at what the user named."""
    global _users_tables
    if path is not None:
        if _users_tables is None:
            _users_tables = os.environ.get("AITER_CONFIG_GEMM_BF16", "")
        os.environ["AITER_CONFIG_GEMM_BF16"] = str(path)
    elif _users_tables is not None:
        os.environ["AITER_CONFIG_GEMM_BF16"] = _users_tables
        if not _users_tables:
            del os.environ["AITER_CONFIG_GEMM_BF16"]
        _users_tables = None


def aiter_machine() -> tuple[str | None, int | None]:
    """The architecture and the compute units that aiter's own variables say it should take the GPU for."""
    gfx = os.environ.get("GPU_ARCHS", "").strip().split(";")[-1].strip()
    units = os.environ.get("CU_NUM", "").strip()
    return gfx if gfx.startswith("gfx") else None, int(units) if units.isdecimal() and int(units) else None


def without_tables() -> dict[str, str]:
    """The environment for a tuner of aiter's: none of the tables in force, which it would read and rewrite."""
    return {name: value for name, value in os.environ.items() if name != "AITER_CONFIG_GEMM_BF16"}


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
        "experts": _switch(environment, "USE_AITER_MOE"),
    }
    refresh = environment.get("HF_ROCM_PROBE", "").strip() == "refresh"
    return Options(
        tiers,
        aiter,
        probe=refresh or _flag(environment, "HF_ROCM_PROBE", default=True),
        refresh=refresh,
        probe_timeout=_seconds(environment, "HF_ROCM_PROBE_TIMEOUT", default=900.0),
        preshuffle=preshuffle_mode(environment.get("HF_ROCM_PRESHUFFLE", "").strip() or "auto", "HF_ROCM_PRESHUFFLE="),
        preshuffle_budget=environment.get("HF_ROCM_PRESHUFFLE_BUDGET", "").strip() or "0",
        preshuffle_threshold=_threshold(environment, "PRESHUFFLE_M_THRESH", default=128),
        graphs=_switch(environment, "HF_ROCM_GRAPHS"),
        graphs_memory=environment.get("HF_ROCM_GRAPHS_MEMORY", "").strip() or "10%",
        ranks_timeout=_seconds(environment, "HF_ROCM_RANKS_TIMEOUT", default=300.0),
    )


def preshuffle_mode(value: Any, source: str = "preshuffle=") -> str:
    """`off`, `auto` or `all`, or an `OptionError`."""
    if value not in PRESHUFFLE:
        raise OptionError(f"{source}{value} is not understood", facts={"allowed": ", ".join(PRESHUFFLE)})
    return str(value)


_overrides: list[Options] = []
_users_tables: str | None = None  # what AITER_CONFIG_GEMM_BF16 was before it pointed at a table of ours


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


def _threshold(environment: Mapping[str, str], name: str, *, default: int) -> int:
    text = environment.get(name, "").strip()
    try:
        rows = int(text) if text else default
    except ValueError:
        rows = -2
    if rows < -1:
        allowed = "a number of rows, 0 (always) or -1 (never)"
        raise OptionError(f"{name}={text} is not understood", facts={"allowed": allowed})
    return rows


def _switch(environment: Mapping[str, str], name: str) -> Switch:
    text = environment.get(name, "").strip()
    if text in ("", "auto"):
        return Switch.AUTO
    try:
        return Switch(text)
    except ValueError:
        raise OptionError(f"{name}={text} is not understood", facts={"allowed": "0, 1, or unset"}) from None
