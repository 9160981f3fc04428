"""Kernels inside compiled graphs: one operator of ours around each call.

aiter declares every tensor that it is given as mutated, weights included, so the compiler would copy them around
each of its own operators. Ours says the truth. Our Triton kernels are wrapped alike: the compiler sees one operator
with a shape, and the choice of tiles stays in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.compiler import is_compiling

_library = torch.library.Library("hf_rocm", "FRAGMENT")


def opaque(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as it is in eager; while torch.compile traces, the operator `hf_rocm::<schema>` that runs it.

    fake: the same arguments, gives an empty result of the right shape, dtype and device.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    run = on_its_device(function)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hf_rocm::{name}", fake, lib=_library)
    operator = getattr(torch.ops.hf_rocm, name).default

    def call(*arguments: Any) -> Any:
        return operator(*arguments) if is_compiling() else run(*arguments)

    return call


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the device of its first tensor as the current one, which not all kernels see to."""

    def run(first: Any, *further: Any) -> Any:
        if several_devices() and first.device.index not in (None, torch.cuda.current_device()):
            with torch.cuda.device(first.device):
                return function(first, *further)
        return function(first, *further)

    return run


@cache
def several_devices() -> bool:
    """Whether a model may be spread over GPUs of this process."""
    return torch.cuda.is_available() and torch.cuda.device_count() > 1
