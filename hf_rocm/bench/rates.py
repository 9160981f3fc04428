"""What this machine can do at most, measured in the same run: copying memory, and multiplying matrices.

Times are put beside these and not beside a data sheet: what no program reaches is no floor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_rocm.bench.clock import device_time

LARGE = 2**30  # bytes of a copied buffer on a GPU: several times its largest cache


class Rates(NamedTuple):
    """copy: bytes a second, read and written counted each. matmul: floating-point operations a second."""

    copy: float
    matmul: float


def measure(device: torch.device, dtype: torch.dtype) -> Rates:
    """The copy bandwidth, and the rate of a large square product in `dtype`: the best of some tries."""
    return Rates(_copy(device), _matmul(device, dtype))


def _copy(device: torch.device) -> float:
    """By a kernel and by PyTorch's own copy, whichever is faster: some engines that copy are slower."""
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
