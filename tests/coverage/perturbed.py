"""Copies of a model whose weights differ by rounding errors, which show the effect of rounding on its results."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn


def perturbed(exact: nn.Module, *, times: int = 4) -> Iterator[nn.Module]:
    """Yield copies of a float64 model whose weights have random relative errors of up to half of fp32's eps."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(times):
        model = copy.deepcopy(exact)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = 2 * torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype) - 1
                parameter.mul_(1 + noise * torch.finfo(torch.float32).eps / 2)
        yield model
