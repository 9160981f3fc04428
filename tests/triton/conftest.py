"""Triton kernels without a GPU: in Triton's interpreter, or as simulated machine code of an AMD GPU.

This is a separate suite for environments with Triton. A process either interprets all kernels or compiles them, and
this must be decided before triton is imported. With `--machine-code gfx942`, the process compiles them, and
`tests/amdgcn` executes the code.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

from tests.amdgcn import suite

INSTALLED = find_spec("triton") is not None


def pytest_configure(config: pytest.Config) -> None:
    suite.configure(config)
    if suite.gpu() is None and INSTALLED and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip this folder's tests unless Triton runs in interpreter mode. With machine code, select the tests that run."""
    if suite.gpu() is not None:
        suite.select(config, items)
        return
    if INSTALLED and os.environ.get("TRITON_INTERPRET") == "1":
        suite.select_interpreted(config, items)
        return
    reason = "not run: needs Triton, imported in interpreter mode (scripts/test creates the environment)"
    for item in suite.kernel_tests(items):
        item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if not suite.plants_faults(session.config) or suite.gpu() is None or session.config.option.collectonly:
        return None
    from tests.amdgcn import faults

    faults.run(session, session.config.getoption("--machine-code-report"))
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    suite.finish(session.config)


@pytest.fixture(autouse=True, scope="session")
def poisoned() -> Iterator[None]:
    """With machine code, fill new tensors with NaN, so that tests detect kernels that don't write all elements."""
    import torch

    if suite.gpu() is None:
        yield
        return
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def as_on_a_gpu() -> Iterator[None]:
    """Round to the nearest bf16 or fp8 number and keep subnormal numbers, as a GPU does.

    The interpreter truncates when it converts to bf16, drops the carry when it rounds to fp8, and shifts the mantissas
    of subnormal bf16 numbers when it converts them to fp32. NumPy's floating-point warnings are suppressed.
    """
    if suite.gpu() is not None:
        yield
        return
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    stock = interpreter._convert_float
    rounded_by_torch = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e4b8: torch.float8_e4m3fnuz}

    def convert(values: Any, from_dtype: Any, to_dtype: Any, rounding_mode: Any) -> Any:
        if (from_dtype, to_dtype) == (tl.bfloat16, tl.float32):
            return np.ascontiguousarray(values).view(np.uint16).astype(np.uint32).reshape(np.shape(values)) << 16
        if from_dtype == tl.float32 and to_dtype in rounded_by_torch:
            wide = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32).reshape(np.shape(values)))
            return wide.to(rounded_by_torch[to_dtype]).view(torch.uint8).numpy()
        if (from_dtype, to_dtype) != (tl.float32, tl.bfloat16):
            return stock(values, from_dtype, to_dtype, rounding_mode)
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16).reshape(np.shape(values))

    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        patch.setattr(interpreter, "_convert_float", convert)
        yield


@pytest.fixture(autouse=True, scope="session")
def range_bounds() -> Iterator[None]:
    """Convert range bounds, which the interpreter stores as arrays, to integers: NumPy 2.4 no longer converts them."""
    if suite.gpu() is not None:
        yield
        return
    from triton.runtime import interpreter

    stock = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        stock(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", patched)
        yield


@pytest.fixture(autouse=True, scope="session")
def patched_once() -> Iterator[None]:
    """Patch triton.language once per launch.

    By default, the interpreter patches triton.language on every call to a device function, and builds its table of
    types on every use. Together, these would take half of the suite's time.
    """
    if suite.gpu() is not None:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    stock_patch, stock_type = interpreter._patch_lang, interpreter._get_np_dtype
    # Modules patched in the current launch.
    patched = set[str]()

    @cache
    def modules_of(function: Any) -> frozenset[str]:
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return frozenset(module.__name__ for module in modules if module in (tl, tl.core))

    def patch_lang(function: Any) -> Any:
        if patched and modules_of(function) <= patched:
            return interpreter._LangPatchScope()
        scope = stock_patch(function)
        if not patched:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        patched.update(modules_of(function))
        return scope

    types = dict[str, Any]()

    def np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in types:
            types[name] = stock_type(kind)
        return types[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_lang)
        patch.setattr(interpreter, "_get_np_dtype", np_dtype)
        yield


@pytest.fixture(autouse=True, scope="session")
def bf16_arithmetic() -> Iterator[None]:
    """Compute dot products, differences and constants of bf16 in fp32, because the interpreter would treat the bits as
    integers."""
    if suite.gpu() is not None:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    stock, stock_fsub = builder.create_dot, builder.create_fsub

    def wide(self: Any, x: Any) -> Any:
        return self.cast_impl(x, tl.float32) if x.dtype == tl.bfloat16 else x

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return stock(self, wide(self, a), wide(self, b), *rest)

    def create_fsub(self: Any, a: Any, b: Any) -> Any:
        difference = stock_fsub(self, wide(self, a), wide(self, b))
        return self.cast_impl(difference, tl.bfloat16) if a.dtype == tl.bfloat16 else difference

    def get_bf16(self: Any, value: float) -> Any:
        return self.cast_impl(self.get_fp32(value), tl.bfloat16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_dot", create_dot)
        patch.setattr(builder, "create_fsub", create_fsub)
        patch.setattr(builder, "get_bf16", get_bf16, raising=False)
        yield


@pytest.fixture(autouse=True)
def unprobed() -> Iterator[None]:
    """Select kernels by their predicates, without first-use checks, whose child process takes seconds per kernel."""
    from hf_rocm import options

    # on a simulated AMD GPU, switch aiter off, because its tier would look for ROCm
    aiter = dict.fromkeys(options.current().aiter, options.Switch.OFF)
    with options.override(probe=False, **({} if suite.gpu() is None else {"aiter": aiter})):
        yield
