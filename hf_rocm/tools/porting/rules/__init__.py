"""The rules, one file per family, with their checks: functions that take a `Module` or text, and yield `Place`s."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hf_rocm.tools.porting.findings import Place, Rule
from hf_rocm.tools.porting.module import Module
from hf_rocm.tools.porting.rules import (
    aiter,
    allocator,
    attention,
    building,
    commands,
    compiling,
    containers,
    devices,
    kernels,
    native,
    packages,
    packaging,
    requirements,
    switches,
)

PYTHON: tuple[Callable[[Module], Iterator[Place]], ...] = (
    packages.imports,
    packaging.setup_calls,
    attention.flash_attention_calls,
    attention.flash_attention_names,
    attention.expanded_before_sdpa,
    devices.capabilities,
    devices.versions,
    devices.nvml,
    kernels.numba_cuda,
    kernels.cupy,
    kernels.triton,
    kernels.fp8,
    kernels.sources,
    kernels.lanes,
    building.in_python,
    commands.started,
    compiling.modes,
    compiling.inductor_settings,
    compiling.random_state_in_capture,
    allocator.split_size,
    switches.flags,
    aiter.unknown_names,
    aiter.positional_arguments,
    aiter.expected_import_error,
)

_FAMILIES = (aiter, allocator, attention, building, commands, compiling, containers, devices, kernels, native, packages,
             requirements, switches)  # fmt: skip
RULES: tuple[Rule, ...] = tuple(
    value for family in _FAMILIES for value in vars(family).values() if isinstance(value, Rule)
)
