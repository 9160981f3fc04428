"""Launch kernels with little overhead, and determine the properties of a device that a launch depends on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from hf_rocm import options
from hf_rocm.device import describe, is_rocm
from hf_rocm.ops.triton import detect

# Triton releases whose rules for specialising a kernel on its arguments are known; `form` implements them.
KNOWN_RULES = frozenset({(3, 6)})

_LARGEST_INT = 2**31
# The largest number of cached kernels, whose keys may include the lengths of prompts.
_MAX_KERNELS = 4096
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

    arguments: the first arguments of its signature: tensors, numbers and None, beginning with a tensor on that device.
    constants: all other arguments, in the order of the signature, hashable. grid: one to three sizes. contract: whether
    a product and a sum may be fused into one operation with one rounding. forms: the `form` of the arguments, or any
    other key that distinguishes the same cases, if the caller can compute it faster.

    At each launch, Triton looks up the compiled kernel, which can take longer than running it. For the releases in
    `KNOWN_RULES`, the kernel is cached here, keyed by everything that it depends on, and later launches run it
    directly.
    """
    launch_options: dict[str, Any] = {"num_warps": num_warps}
    if num_stages is not None:
        launch_options["num_stages"] = num_stages
    if not contract:
        launch_options["enable_fp_fusion"] = False
    if not _caches_kernels():
        kernel[grid](*arguments, **constants, **launch_options)
        return
    device = arguments[0].get_device()
    if forms is None:
        forms = tuple(map(form, arguments))
    key = (id(kernel), device, *launch_options.values(), *constants.values(), forms)
    compiled = _compiled.get(key)
    if compiled is not None:
        _relaunch(compiled, (*grid, 1, 1)[:3], device, (*arguments, *constants.values()))
        return
    if len(_compiled) >= _MAX_KERNELS:
        _compiled.clear()
    _compiled[key] = kernel[grid](*arguments, **constants, **launch_options)


def _relaunch(compiled: Any, grid: tuple[int, ...], device: int, arguments: tuple[Any, ...]) -> None:
    """Launch a kernel that Triton has compiled and loaded, as the last part of Triton's own launch does."""
    runtime = _runtime()
    if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
        # This launch also calls a profiler's hooks.
        compiled[grid](*arguments)
        return
    stream = _driver().get_current_stream(device)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


@cache
def _runtime() -> Any:
    from triton import knobs

    return knobs.runtime


@cache
def _driver() -> Any:
    from triton.runtime import driver

    return driver.active


def forms_of(*tensors: Tensor | None) -> tuple[Any, ...]:
    """`form` of several tensors or None at once. Without ROCm, the dtypes alone if all tensors are aligned."""
    addresses, dtypes = 0, tuple[torch.dtype | None, ...]()
    for tensor in tensors:
        if tensor is None:
            dtypes += (None,)
        else:
            addresses |= tensor.data_ptr()
            dtypes += (tensor.dtype,)
    return tuple(map(form, tensors)) if addresses % 16 or is_rocm() else dtypes


def forms_of_strides(strides: tuple[int, ...]) -> Any:
    """`form` of several strides at once: True if all are multiples of 16 in [0, 2³¹), as usual."""
    union = reduce(or_, strides)
    return (union % 16 == 0 and 0 <= union < _LARGEST_INT) or tuple(map(form, strides))


def form(value: Any) -> Any:
    """The properties of an argument that Triton specialises a kernel on."""
    if isinstance(value, Tensor):
        # AMD's compiler uses 32-bit offsets for less than 2 GiB.
        small = is_rocm() and value.untyped_storage().nbytes() < _LARGEST_INT
        return value.dtype, value.data_ptr() % 16 == 0, small
    if isinstance(value, int):
        return value == 1 or (value % 16 == 0, -_LARGEST_INT <= value < _LARGEST_INT)
    return type(value)


@cache
def _caches_kernels() -> bool:
    """Whether compiled kernels are cached here: only without the interpreter and only for releases with known rules."""
    return not options.triton_interprets() and detect.release().version.release[:2] in KNOWN_RULES


# Caches the results of a function whose arguments may include the lengths of prompts.
cached = lru_cache(maxsize=_MAX_KERNELS)


@cache
def lanes(device: torch.device) -> int:
    """Threads per warp: 64 on gfx9 (CDNA, and Vega before it), 32 elsewhere."""
    arch = describe(device).arch
    return 64 if arch is not None and arch.startswith("gfx9") else 32


def warps(threads: int, device: torch.device) -> int:
    """The number of warps for this number of threads; both are powers of two."""
    return max(1, threads // lanes(device))


def dense(x: Tensor) -> Tensor:
    """[B, H, S, D] with a last stride of 1, copied if necessary."""
    return x if x.stride(3) == 1 else x.contiguous()


@cached
def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length() if size > 1 else 1


@cache
def units(device: torch.device) -> int:
    """The number of compute units of a GPU; 2 for the CPU, which interprets the kernel."""
    counted = describe(device).units
    if counted is not None:
        return counted
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def in_pairs(k: int, x: Tensor, *others: Tensor | None) -> bool:
    """Whether a kernel can read two numbers of these tensors [..., K] at a time; see `kernels.pairs`.

    If K is an odd multiple of 16, rows of K / 2 words are not multiples of 16, so Triton would load single words.
    """
    if x.element_size() != 2 or k % 2 or k % 32 == 16:
        return False
    tensors = [x, *[tensor for tensor in others if tensor is not None]]
    return all([tensor.dtype == x.dtype and tensor.data_ptr() % 4 == 0 for tensor in tensors])
