"""Device functions that load a piece of a tensor, which is masked only if it may be partial."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build


@triton.jit
def piece(at, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def read_once(at, inside, EVEN: tl.constexpr):
    """`piece`, for numbers that the step does not read again: on NVIDIA GPUs, other data stays in the cache longer."""
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")


# Other kernels call the functions of this module.
BUILDS: tuple[Build, ...] = ()
