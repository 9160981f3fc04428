"""All options. No other module reads the environment.

An option is an environment variable and, where that makes sense, also an argument; arguments take precedence. Models
that hf_rocm does not serve ignore the options. The table in the README is generated from `VARIABLES`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from hf_rocm.errors import OptionError
from hf_rocm.option_values import flag, memory, number, seconds

# The tiers in order of preference. `user` contains the implementations that users register.
TIERS = ("user", "aiter", "triton", "torch", "eager")
PRESHUFFLE = ("off", "auto", "all")
OPERATIONS = ("attention", "linear", "act_and_mul", "rms_norm", "rope", "experts")


class Switch(Enum):
    """A switch with three states: auto (unset), required (1: an error with the reason if not possible), off (0)."""

    AUTO = "auto"
    REQUIRED = "1"
    OFF = "0"


class Variable(NamedTuple):
    """One environment variable: its name, values and meaning, as listed in the README."""

    name: str
    values: str
    meaning: str


VARIABLES = (
    Variable("HF_ROCM_FORCE", "0, 1", "enable the ROCm path without ROCm, for tests and measurements"),
    Variable("HF_ROCM_AUTO", "0, 1", "prepare models that plain transformers loads, where overlays are installed"),
    Variable(
        "HF_ROCM_TIER",
        "aiter, triton, torch, eager, user; or per op: attention=torch,linear=eager",
        "the named tier must work, or the call raises with every reason",
    ),
    Variable(
        "HF_ROCM_PROBE",
        "0, 1, refresh",
        "check a kernel against the eager tier before its first use (default 1); refresh: even if it passed before",
    ),
    Variable(
        "HF_ROCM_PROBE_TIMEOUT",
        "seconds, inf",
        "time limit for building and checking a kernel (default 900; inf: no limit)",
    ),
    Variable("HF_ROCM_CACHE", "a folder", "where passed checks and tuned GEMMs are stored (default ~/.cache/hf_rocm)"),
    Variable("USE_AITER_ATTENTION", "unset, 0, 1", "attention through aiter: auto, never, or required"),
    Variable("USE_AITER_GEMM", "unset, 0, 1", "linear layers through aiter: auto, never, or required"),
    Variable("USE_AITER_MOE", "unset, 0, 1", "MoE experts through aiter: auto, never, or required"),
    Variable("USE_OPTIMIZED_OPS", "unset, 0, 1", "activation, norm and rope through aiter: auto, never, or required"),
    Variable(
        "AITER_CONFIG_GEMM_BF16",
        "CSV files, separated by `:`",
        "tables of tuned GEMMs for aiter; they take precedence over aiter's own, and the files are never modified",
    ),
    Variable(
        "HF_ROCM_PRESHUFFLE",
        "auto, all, off",
        "shuffle weights for aiter's assembly kernels: where a gain is known (default), wherever possible, or never",
    ),
    Variable(
        "HF_ROCM_PRESHUFFLE_BUDGET",
        "bytes, 4GiB, 25%",
        "memory limit for shuffled copies; a percentage refers to the model's weights (default 0: no copies)",
    ),
    Variable(
        "PRESHUFFLE_M_THRESH",
        "rows",
        "fewest rows of a GEMM that uses a shuffled copy (default 128); 0: always, and the shuffled weight replaces "
        "the original; -1: never",
    ),
    Variable(
        "HF_ROCM_GRAPHS",
        "unset, 0, 1",
        "record prompts, decode steps and encoder forwards of prepared models as HIP graphs: auto, never, or required",
    ),
    Variable(
        "HF_ROCM_GRAPHS_MEMORY",
        "bytes, 4GiB, 10%",
        "memory limit for the caches and recordings that a model keeps between calls; a percentage refers to the "
        "device's memory (default 10%; 0 keeps none)",
    ),
    Variable(
        "HF_ROCM_PAD_TOKENS",
        "tokens",
        "largest encoder call (rows × padded length) that is padded, so that calls of many lengths share recordings "
        "(default 16384; 0: never)",
    ),
    Variable("FORCE_EAGER_ATTENTION", "0, 1", "attention in plain PyTorch (the same as HF_ROCM_TIER=attention=eager)"),
    Variable(
        "HF_ROCM_RANKS_TIMEOUT",
        "seconds",
        "how long a rank waits for the others before they load a model together (default 300)",
    ),
)

# Variables in which torchrun, accelerate and other launchers describe a process's rank.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE",
             "TORCHELASTIC_RESTART_COUNT")  # fmt: skip


@dataclass(frozen=True)
class Options:
    """The options for running models. `parse` validates the values from the environment."""

    tiers: Mapping[str, str]
    aiter: Mapping[str, Switch]
    probe: bool = True
    refresh: bool = False
    probe_timeout: float = 900.0
    preshuffle: str = "auto"
    preshuffle_budget: str = "0"
    # Rows; 0: replace the original, -1: shuffle nothing.
    preshuffle_threshold: int = 128
    graphs: Switch = Switch.AUTO
    graphs_memory: str = "10%"
    # Rows × padded length; 0: never.
    pad_tokens: int = 16384
    ranks_timeout: float = 300.0

    def tier(self, operation: str) -> str | None:
        """Return the tier that the user selected for this operation, or None."""
        return self.tiers.get(operation)


def force_requested() -> bool:
    """Return whether `HF_ROCM_FORCE` enables the ROCm path on any machine."""
    return flag(os.environ, "HF_ROCM_FORCE", default=False)


def auto_requested() -> bool:
    """Return whether `HF_ROCM_AUTO` enables preparing every model that transformers loads."""
    return flag(os.environ, "HF_ROCM_AUTO", default=False)


def aiter_may_log() -> bool:
    """Return whether one of aiter's own variables enables its log; otherwise, only aiter's warnings are logged."""
    return bool(os.environ.get("AITER_LOG_LEVEL")) or os.environ.get("AITER_LOG_MORE", "0") not in ("", "0")


def triton_interprets() -> bool:
    """Return whether Triton's own variable enables its interpreter, which needs no GPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def environment() -> dict[str, str]:
    """Return a copy of all environment variables, for checks, reports and child processes."""
    return dict(os.environ)


def launcher() -> dict[str, str]:
    """Return the launcher's variables that describe this process's rank; empty if there is no launcher."""
    return {name: os.environ[name].strip() for name in _LAUNCHER if os.environ.get(name, "").strip()}


def set_variable(name: str, value: str | None) -> None:
    """Set a variable of this process and of its children; None removes it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def cache_folder() -> Path:
    """Return the folder for facts about this machine, such as passed checks.

    Raises `OSError` if it would be in the user's home folder and there is none.
    """
    named = os.environ.get("HF_ROCM_CACHE", "").strip()
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    try:
        return Path(named).expanduser() if named else Path(base or "~/.cache").expanduser() / "hf_rocm"
    except RuntimeError as error:
        # There is no HOME, and no entry for this user in the system's user database.
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder") from error


def tuned_tables() -> list[tuple[str, int]]:
    """Return the tables of tuned GEMMs that aiter is configured to use, with their mtimes in ns (0: not readable)."""
    paths = [Path(name) for name in os.environ.get("AITER_CONFIG_GEMM_BF16", "").split(os.pathsep) if name]
    return [(str(path), _written(path)) for path in paths]


def _written(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except (OSError, ValueError):
        # The error is reported when the table is read.
        return 0


def tuned_files() -> list[Path]:
    """Return the tables that the user set in AITER_CONFIG_GEMM_BF16, in order; hf_rocm never writes to them."""
    text = os.environ.get("AITER_CONFIG_GEMM_BF16", "") if _users_tables is None else _users_tables
    return [Path(name) for name in text.split(os.pathsep) if name]


def use_tuned_table(path: Path | None) -> None:
    """Make aiter use one of hf_rocm's tables in this process and its children; None restores the user's tables."""
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
    """Return the architecture and the number of compute units that aiter's own variables set, if any."""
    gfx = os.environ.get("GPU_ARCHS", "").strip().split(";")[-1].strip()
    units = os.environ.get("CU_NUM", "").strip()
    return gfx if gfx.startswith("gfx") else None, int(units) if units.isdecimal() and int(units) else None


def without_tables() -> dict[str, str]:
    """Return the environment for aiter's tuner, without the current tables, which the tuner would rewrite."""
    return {name: value for name, value in os.environ.items() if name != "AITER_CONFIG_GEMM_BF16"}


def current() -> Options:
    """Return the current options: the innermost `override`, else the environment as of the first call or `refresh`."""
    return _overrides[-1] if _overrides else _from_environment()


def refresh() -> None:
    """Read the environment and select kernels again if a variable has changed. Warns about unknown option names."""
    global _read
    check_names()
    if _read is not None and _read[0] != _values():
        _read = None
        _forget_choices()


def check_names() -> None:
    """Log one warning for every environment variable that looks like an option but is not one."""
    # Imported here, because an inert overlay block does not need this module.
    from hf_rocm.variables import warn_of_unknown

    warn_of_unknown(os.environ, (variable.name for variable in VARIABLES))


def invalid(environment: Mapping[str, str]) -> OptionError | None:
    """Return the error of the first option with an invalid value, or None. Nothing is raised or cached."""
    try:
        for name in ("HF_ROCM_FORCE", "HF_ROCM_AUTO"):
            flag(environment, name, default=False)
        parse(environment)
    except OptionError as error:
        return error
    return None


@contextmanager
def override(**changes: Any) -> Iterator[Options]:
    """Change options within a block: `tiers={"attention": "eager"}` or `tier="torch"` for every operation."""
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
    """Read options from a mapping. Raises `OptionError` with the variable, its value and the allowed values."""
    tiers = _parse_tiers(environment.get("HF_ROCM_TIER", ""), source="HF_ROCM_TIER=")
    if flag(environment, "FORCE_EAGER_ATTENTION", default=False):
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
        probe=refresh or flag(environment, "HF_ROCM_PROBE", default=True, allowed="0, 1, refresh, or unset"),
        refresh=refresh,
        probe_timeout=seconds(environment, "HF_ROCM_PROBE_TIMEOUT", default=900.0),
        preshuffle=preshuffle_mode(environment.get("HF_ROCM_PRESHUFFLE", "").strip() or "auto", "HF_ROCM_PRESHUFFLE="),
        preshuffle_budget=memory(environment, "HF_ROCM_PRESHUFFLE_BUDGET", default="0"),
        preshuffle_threshold=number(
            environment,
            "PRESHUFFLE_M_THRESH",
            default=128,
            smallest=-1,
            allowed="a number of rows, 0 (always) or -1 (never)",
        ),
        graphs=_switch(environment, "HF_ROCM_GRAPHS"),
        graphs_memory=memory(environment, "HF_ROCM_GRAPHS_MEMORY", default="10%"),
        pad_tokens=number(environment, "HF_ROCM_PAD_TOKENS", default=16384, allowed="a number of tokens, or 0 (never)"),
        ranks_timeout=seconds(environment, "HF_ROCM_RANKS_TIMEOUT", default=300.0, largest=1e9),
    )


def preshuffle_mode(value: Any, source: str = "preshuffle=") -> str:
    """Return `value` if it is `off`, `auto` or `all`, else raise `OptionError`."""
    if value not in PRESHUFFLE:
        raise OptionError(f"{source}{value} is not valid", facts={"allowed": ", ".join(PRESHUFFLE)})
    return str(value)


_overrides: list[Options] = []
# The value of AITER_CONFIG_GEMM_BF16 before it was set to hf_rocm's table.
_users_tables: str | None = None


# Variables that are read at every use and are not part of `Options`.
_READ_AT_USE = ("HF_ROCM_FORCE", "HF_ROCM_AUTO", "HF_ROCM_CACHE", "AITER_CONFIG_GEMM_BF16")
# The values that were read, and the options parsed from them.
_read: tuple[list[str | None], Options] | None = None


def _from_environment() -> Options:
    global _read
    _read = _read or (_values(), parse(os.environ))
    return _read[1]


def _values() -> list[str | None]:
    return [os.environ.get(variable.name) for variable in VARIABLES if variable.name not in _READ_AT_USE]


def _forget_choices() -> None:
    """Drop the kernel choices that are cached per specification, because they depend on the options."""
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
            tier = tier if "=" in part else operation
            unknown = f"operation {operation!r}" if "=" in part and operation not in OPERATIONS else f"tier {tier!r}"
            raise OptionError(
                f"{source}{text}: unknown {unknown}",
                facts={"tiers": ", ".join(TIERS), "operations": ", ".join(OPERATIONS)},
                hint="set one tier for all operations, or pairs such as attention=torch,linear=eager",
            )
        tiers[operation] = tier
    return tiers


def _switch(environment: Mapping[str, str], name: str) -> Switch:
    text = environment.get(name, "").strip()
    if text in ("", "auto"):
        return Switch.AUTO
    try:
        return Switch(text)
    except ValueError:
        raise OptionError(f"{name}={text} is not valid", facts={"allowed": "0, 1, or unset"}) from None
