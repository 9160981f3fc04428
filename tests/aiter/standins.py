"""The real amd-aiter package on a machine without a GPU: only its compiled modules and one function are stand-ins.

The commands that aiter runs (`hipconfig`, `rocminfo`, `hipcc`) are scripts on PATH, and a meta-path finder returns
Python modules instead of compiled ones. Registration, schemas, fake kernels, dispatch and `shuffle_weight` are aiter's
code.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
# aiter calls this function with a new CUDA tensor, so the stand-in replaces the function in its Python module.
ON_CUDA = ("aiter.ops.gemm_op_common", "get_padded_m")
COMPILED = re.compile(r"aiter\.jit\.((module|mha|fmha)_\w+)$")

TOOLS = {
    "hipconfig": "echo 6.4.43482-0f2d60242",
    "rocminfo": "printf 'Agent 1\\n  Name: gfx942\\n  Device Type: GPU\\n  Compute Unit: 304\\n'",
    "hipcc": "echo 'HIP version: 6.4.43482-0f2d60242'",
}


def environment(folder: Path) -> dict[str, str]:
    """Write the scripts to `folder` and return the environment variables that aiter and the stand-ins need.

    Child processes inherit the variables.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, script in TOOLS.items():
        tool = folder / name
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    broken = folder / "broken"
    broken.write_text("")
    return {
        "STANDIN_BROKEN": str(broken),
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "GPU_ARCHS": "gfx942",
        "CU_NUM": "304",
        "PYTHONPATH": str(HERE / "child"),
    }


def install() -> None:
    """Install the stand-ins in this process."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


class Finder:
    """Find the modules that aiter would compile at first use, and replace the function ON_CUDA in its module."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == ON_CUDA[0]:
            spec = PathFinder.find_spec(name, path)  # type: ignore[arg-type]
            assert spec is not None and isinstance(spec.loader, SourceFileLoader)
            spec.loader = Replacing(spec.loader.name, spec.loader.path)
            return spec
        matched = COMPILED.match(name)
        return ModuleSpec(name, Loader(matched[1])) if matched else None


class Replacing(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        setattr(module, ON_CUDA[1], getattr(load_kernels(), ON_CUDA[1]))


class Loader:
    def __init__(self, compiled: str) -> None:
        self.compiled = compiled

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        kernels = load_kernels()
        # aiter logs the path.
        module.__file__ = str(HERE / "native" / "__init__.py")
        vars(module).update(kernels.of_module(self.compiled))


def load_kernels() -> ModuleType:
    """Import the folder `native` once per process, when a stand-in is first needed, because it imports torch."""
    name = "aiter_standin_kernels"
    if name not in sys.modules:
        folder = HERE / "native"
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
