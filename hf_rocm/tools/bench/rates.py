"""The memory bandwidth and GEMM rate of this machine, measured in the same run.

Times are compared with these rates, since no program reaches the rates in a data sheet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_rocm.tools.bench.clock import device_time

# Bytes of a copied buffer on a GPU, several times the size of the largest cache.
LARGE = 2**30


class Rates(NamedTuple):
    """The measured rates. copy: bytes read plus bytes written per second. matmul: FLOPs per second."""

    copy: float
    matmul: float


def measure(device: torch.device, dtype: torch.dtype) -> Rates:
    """Return the bandwidth of a copy, and the rate of a large square GEMM in `dtype`: the best of several runs."""
    return Rates(_copy(device), _matmul(device, dtype))


def _copy(device: torch.device) -> float:
    """Return the bandwidth of an elementwise kernel or of `copy_`, whichever is higher: some copy engines are slow."""
    size = LARGE if device.type == "cuda" else LARGE // 16
    source, target = (torch.zeros(size // 4, dtype=torch.float32, device=device) for _ in range(2))
    ways: tuple[Callable[[], Tensor], ...] = (
        lambda: torch.mul(source, 1.0, out=target),
        lambda: target.copy_(source),
    )
    return 2 * size / min(second for way in ways for second in device_time([way] * 4, device, record=False))


def _matmul(device: torch.device, dtype: torch.dtype) -> float:
    size = 8192 if device.type == "cuda" else 1024
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, dtype=dtype, generator=generator) for _ in range(2))
    seconds = device_time([lambda: torch.matmul(left, right)] * 4, device)
    return 2 * size**3 / min(seconds)
