"""How a kernel is compiled ahead of time, for GPUs that needn't be there.

Every module of `kernels` lists its `BUILDS`: the shapes and types that users meet most. `scripts/build-kernels`
compiles each for every architecture in `ARCHITECTURES`, and fails on what an AMD GPU would suffer from in silence:
spilled registers, more local memory than there is, products without matrix instructions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The lanes of a wave: CDNA 2, 3 and 4; RDNA 3 and 4.
ARCHITECTURES: Mapping[str, int] = {"gfx90a": 64, "gfx942": 64, "gfx950": 64, "gfx1100": 32, "gfx1201": 32}

# Local memory (LDS) of a workgroup, in bytes, where it isn't 64 KiB.
LOCAL_MEMORY: Mapping[str, int] = {"gfx950": 160 * 1024}


@dataclass(frozen=True)
class Build:
    """One kernel with one set of types and constants.

    kernel: the `@triton.jit` function. signature: the type of every argument that is no constant, `*bf16`, `i32`,
    `fp32`, … constants: the value of every other argument, `None` for a tensor that isn't there. threads: instead of
    num_warps, where wide waves make fewer warps of as many threads. divisible: integer arguments that are multiples of
    16, as the launcher would find them; pointers are taken to be aligned to 16 bytes. matrix: its products must become
    matrix instructions (MFMA, WMMA). options: further launch options such as `waves_per_eu`. architectures: where it
    is built, if not everywhere.
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
        """How many of so many lanes."""
        return self.num_warps if self.threads is None else max(1, self.threads // lanes)


def compiled_for(build: Build, target: Any) -> Any:
    """What Triton compiles for a `GPUTarget`, on any machine. Raises `ValueError` if an argument is left open."""
    import triton
    from triton.compiler import ASTSource

    names = build.kernel.arg_names
    given = {*build.signature, *build.constants}
    if given != set(names):
        raise ValueError(f"its BUILDS don't say what {', '.join(sorted(given ^ set(names)))} is")
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
