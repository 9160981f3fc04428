"""PyTorch's default random generators, and their states."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that PyTorch uses on this device by default."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    generator: torch.Generator = torch.cuda.default_generators[index]
    return generator


def states(device: torch.device) -> Iterator[tuple[torch.Generator, Tensor]]:
    """The generators that sampling on this device may use, with their states."""
    for generator in {torch.default_generator, default_generator(device)}:
        yield generator, generator.get_state()
