"""Every kernel in hf_rocm.ops.triton."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Any

import hf_rocm.ops.triton.kernels as package


def modules() -> dict[str, ModuleType]:
    """The kernel modules by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return {name: importlib.import_module(f"{package.__name__}.{name}") for name in names}


def entries(module: ModuleType) -> set[str]:
    """The kernels that the host launches: the jitted functions that no other jitted function calls."""
    from triton.runtime.jit import JITFunction

    functions: dict[str, Any] = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and value.fn.__module__ == module.__name__
    }
    called = set[str]()
    for other in modules().values():
        for value in vars(other).values():
            if isinstance(value, JITFunction):
                called.update(inspect.unwrap(value.fn).__code__.co_names)
    return {name for name in functions if name not in called}


def built(module: ModuleType) -> set[str]:
    """The kernels that the module's BUILDS compile ahead of time."""
    return {build.kernel.__name__ for build in module.BUILDS}
