"""Kernels in compiled graphs: an operator of hf_rocm wraps each call.

aiter's own operators declare every tensor argument as mutated, weights included, so the compiler would copy the weights
before each call. The operators here declare only real mutations. Triton kernels are wrapped too: the compiler sees one
operator with a known output shape, and Python chooses the tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import compiler

_library = torch.library.Library("hf_rocm", "FRAGMENT")

# torch.compiler.is_compiling(), but as fast as a cache lookup. torch.compile ignores function caches and traces the
# function itself, whose result is then True; torch.export sets `compiler._is_compiling_flag`.
compiling = cache(compiler.is_compiling)
compiling()


def opaque(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function` in eager mode, and an operator with this schema in compiled code.

    schema: the operator's name in the namespace `hf_rocm`, its arguments and its results. fake: takes the same
    arguments and returns an empty result with the right shape, dtype and device.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    run = on_its_device(function)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hf_rocm::{name}", fake, lib=_library)
    operator = getattr(torch.ops.hf_rocm, name).default

    def call(*arguments: Any) -> Any:
        if compiling() or compiler._is_compiling_flag:
            return operator(*arguments)
        return run(*arguments) if several_devices() else function(*arguments)

    return call


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function` with the device of its first argument as the current device.

    Not every kernel sets the device.
    """

    def run(first: Any, *rest: Any) -> Any:
        if several_devices() and first.device.index not in (None, torch.cuda.current_device()):
            with torch.cuda.device(first.device):
                return function(first, *rest)
        return function(first, *rest)

    return run


@cache
def several_devices() -> bool:
    """Whether this process has more than one GPU."""
    return torch.cuda.is_available() and torch.cuda.device_count() > 1
