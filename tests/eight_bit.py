"""Which 8-bit products this PyTorch has on the CPU: they are private to it and differ by release."""

from __future__ import annotations

import warnings

import pytest
import torch
from packaging.version import Version

from hf_rocm.ops.eight_bit import FORMATS
from hf_rocm.ops.quantized import QuantizedSpec, choose

HAS_ALL = Version("2.13")


def served(format: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether the torch tier multiplies them. A check that fails warns, here and not in the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return choose(QuantizedSpec(dtype, format, torch.device("cpu"), 64, 64, None, False))[0] == "torch"


def needs(format: torch.dtype, dtype: torch.dtype) -> None:
    """Skip a test of the torch tier in a release that lacks this product; from 2.13 on none does."""
    if not served(format, dtype):
        assert Version(torch.__version__) < HAS_ALL, f"PyTorch {torch.__version__} multiplies {format} for {dtype}"
        pytest.skip(f"PyTorch {torch.__version__} has no product for {format}")


def check_all() -> None:
    """Have every product checked before a test that asks for none in particular."""
    for format in FORMATS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            served(format, dtype)
