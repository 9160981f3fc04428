"""Compile kernels ahead of time, for GPUs that need not be present.

Every module of `kernels` lists its `BUILDS`: the most common shapes and types. `scripts/build-kernels` compiles
each build for its architectures. It fails on spilled registers, on more LDS than the GPU has, on GEMMs without
matrix instructions, and on instructions that `tests/amdgcn` can't execute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_rocm.architectures import BUILT_AHEAD, KNOWN

# The wave size of every architecture that kernels are compiled for: 64 on CDNA, 32 on RDNA.
ARCHITECTURES: Mapping[str, int] = {gfx: KNOWN[gfx].wave for gfx in BUILT_AHEAD}

# RDNA 3 and 3.5, which do not support some variants of the kernels.
GFX11 = tuple(gfx for gfx in ARCHITECTURES if gfx.startswith("gfx11"))

# The shared memory (LDS) of a workgroup in bytes, if it is not 64 KiB.
SHARED_MEMORY: Mapping[str, int] = {"gfx950": 160 * 1024}


@dataclass(frozen=True)
class Build:
    """One kernel with one set of types and constants.

    kernel: the `@triton.jit` function. signature: the type of every argument that is not a constant, such as `*bf16`,
    `i32` or `fp32`. constants: the value of every other argument, `None` for an absent tensor. threads: given instead
    of num_warps if the number of threads is fixed and the number of warps depends on the wave size. divisible: integer
    arguments that are multiples of 16; pointers are assumed to be aligned to 16 bytes. matrix: whether its GEMMs
    must become matrix instructions (MFMA, WMMA). options: other launch options such as `waves_per_eu`. architectures:
    the architectures for which the kernel is compiled.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    threads: int | None = None
    divisible: tuple[str, ...] = ()
    matrix: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    architectures: tuple[str, ...] = tuple(ARCHITECTURES)

    def warps(self, lanes: int) -> int:
        """The number of warps, for this wave size."""
        return self.num_warps if self.threads is None else max(1, self.threads // lanes)


def compiled_for(build: Build, target: Any) -> Any:
    """Compile a build for a `GPUTarget`, on any machine. Returns Triton's compiled kernel.

    Raises `ValueError` unless the build lists exactly the kernel's arguments.
    """
    import triton
    from triton.compiler import ASTSource

    names = build.kernel.arg_names
    given = {*build.signature, *build.constants}
    if given != set(names):
        raise ValueError(f"this build does not match the kernel's arguments: {', '.join(sorted(given ^ set(names)))}")
    signature = {name: build.signature.get(name, "constexpr") for name in names}
    whole = [
        index
        for index, name in enumerate(names)
        if signature[name].startswith("*") or (name in build.divisible and signature[name] != "constexpr")
    ]
    source = ASTSource(
        fn=build.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in build.constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in whole},
    )
    options = {"num_warps": build.warps(target.warp_size), "num_stages": build.num_stages, **build.options}
    return triton.compile(source, target=target, options=options)
