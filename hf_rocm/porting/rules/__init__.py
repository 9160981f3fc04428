"""The rules, one file a family. A rule for Python takes a `Module`, the others take a text; each yields `Place`s."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hf_rocm.porting.findings import Place
from hf_rocm.porting.module import Module
from hf_rocm.porting.rules import aiter, allocator, attention, compiling, packages, switches

PYTHON: tuple[Callable[[Module], Iterator[Place]], ...] = (
    packages.imports,
    attention.flash_attention_calls,
    attention.expanded_before_sdpa,
    compiling.modes,
    compiling.inductor_settings,
    compiling.random_state_in_capture,
    allocator.split_size,
    switches.flags,
    aiter.unknown_names,
    aiter.positional_arguments,
    aiter.expected_import_error,
)
