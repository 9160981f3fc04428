"""Our Triton kernels in Triton's interpreter, on the CPU: the real numbers of every kernel, without a GPU.

A suite apart, where Triton is installed. The variable must be set before triton is imported by anybody: a process
either interprets all kernels or compiles them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

HERE = find_spec("triton") is not None
if HERE and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without Triton they are reported as not run, by name."""
    if HERE and os.environ.get("TRITON_INTERPRET") == "1":
        return
    reason = "not run: needs Triton, interpreted from the start (scripts/test makes its environment)"
    for item in items:
        if "tests/triton/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="session")
def as_on_a_gpu() -> Iterator[None]:
    """As on a GPU: bf16 is rounded to the nearest, which the interpreter cuts off, and infinity is no warning."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    stock = interpreter._convert_float

    def convert(values: Any, from_dtype: Any, to_dtype: Any, rounding_mode: Any) -> Any:
        if (from_dtype, to_dtype) != (tl.float32, tl.bfloat16):
            return stock(values, from_dtype, to_dtype, rounding_mode)
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16).reshape(np.shape(values))

    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        patch.setattr(interpreter, "_convert_float", convert)
        yield


@pytest.fixture(autouse=True, scope="session")
def counts() -> Iterator[None]:
    """The interpreter holds numbers as arrays of one element, which NumPy 2.4 no longer takes as bounds of a range."""
    from triton.runtime import interpreter

    stock = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        stock(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", patched)
        yield


@pytest.fixture(autouse=True, scope="session")
def products() -> Iterator[None]:
    """The interpreter multiplies the bits of bf16 matrices, as if they were integers."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    stock = builder.create_dot

    def wide(self: Any, x: Any) -> Any:
        return self.cast_impl(x, tl.float32) if x.dtype == tl.bfloat16 else x

    def create_dot(self: Any, a: Any, b: Any, *further: Any) -> Any:
        return stock(self, wide(self, a), wide(self, b), *further)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_dot", create_dot)
        yield


@pytest.fixture(autouse=True)
def unprobed() -> Iterator[None]:
    """Kernels are chosen by their predicates alone: they are what is tested, and a child for each takes seconds."""
    from hf_rocm import options

    with options.override(probe=False):
        yield
