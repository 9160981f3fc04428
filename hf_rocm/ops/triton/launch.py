"""Launching a kernel at little cost, and what every launch needs to know about the device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hf_rocm import options
from hf_rocm.device import describe, is_rocm
from hf_rocm.ops.triton import detect

# Releases whose rules for specialising a kernel on its arguments were read; `form` repeats them.
READ = frozenset({(3, 6)})

_LARGEST_INT = 2**31
_MOST = 4096  # compiled forms that are remembered; lengths of prompts may be among what they depend on
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    constants: Mapping[str, Any],
    *,
    num_warps: int,
    num_stages: int | None = None,
    contract: bool = True,
    forms: tuple[Any, ...] | None = None,
) -> None:
    """Launch a `@triton.jit` kernel on the current device.

    arguments: what comes first in its signature, tensors, numbers and None, a tensor of that device at the front;
    constants: all the rest, in the order of the signature, hashable. grid: one to three sizes. contract: products and
    sums may become one operation with one rounding. forms: what `form` gives for the arguments, or anything that tells
    them apart as well, where the caller knows it with less ado.

    Triton looks for the compiled form of a kernel anew at each launch, for longer than the kernel runs. Here it is
    remembered under what it depends on, and launched directly the next time.
    """
    how: dict[str, Any] = {"num_warps": num_warps}
    if num_stages is not None:
        how["num_stages"] = num_stages
    if not contract:
        how["enable_fp_fusion"] = False
    if not _remembers():
        kernel[grid](*arguments, **constants, **how)
        return
    device = arguments[0].get_device()
    if forms is None:
        forms = tuple(map(form, arguments))
    key = (id(kernel), device, *how.values(), *constants.values(), forms)
    compiled = _compiled.get(key)
    if compiled is not None:
        _again(compiled, (*grid, 1, 1)[:3], device, (*arguments, *constants.values()))
        return
    if len(_compiled) >= _MOST:
        _compiled.clear()
    _compiled[key] = kernel[grid](*arguments, **constants, **how)


def _again(compiled: Any, grid: tuple[int, ...], device: int, arguments: tuple[Any, ...]) -> None:
    """Launch what Triton has compiled and loaded, as its own launch does at the end."""
    runtime = _runtime()
    if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
        compiled[grid](*arguments)  # a profiler wants to be told
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


@cache
def _runtime() -> Any:
    from triton import knobs

    return knobs.runtime


def alike(*tensors: Tensor) -> Any:
    """`form` of several tensors at once, which nearly always are of one dtype and aligned."""
    addresses, dtype, same = 0, tensors[0].dtype, not is_rocm()
    for each in tensors:
        addresses |= each.data_ptr()
        same = same and each.dtype == dtype
    if same and addresses % 16 == 0:
        return dtype
    return tuple(map(form, tensors))


def form(value: Any) -> Any:
    """What of an argument a kernel is specialised on."""
    if isinstance(value, Tensor):
        # AMD's compiler addresses less than 2 GiB with 32 bits
        small = is_rocm() and value.untyped_storage().nbytes() < _LARGEST_INT
        return value.dtype, value.data_ptr() % 16 == 0, small
    if isinstance(value, int):
        return value == 1 or (value % 16 == 0, -_LARGEST_INT <= value < _LARGEST_INT)
    return type(value)


@cache
def _remembers() -> bool:
    """Whether kernels are compiled, by a Triton whose rules are known."""
    return not options.triton_interprets() and detect.release().version.release[:2] in READ


@cache
def lanes(device: torch.device) -> int:
    """Threads of a warp: 64 on CDNA (and GCN before it), 32 elsewhere."""
    arch = describe(device).arch
    return 64 if arch is not None and arch.startswith("gfx9") else 32


def warps(threads: int, device: torch.device) -> int:
    """How many warps give so many threads; both are powers of two."""
    return max(1, threads // lanes(device))


def power_of_two(size: int) -> int:
    """The smallest power of two that isn't less."""
    return 1 << (size - 1).bit_length() if size > 1 else 1
