"""Decisions about recorded steps, made jointly by all ranks that share a model's layers.

A recorded step contains the collectives of its rank. If one rank recorded or compared a step while another one ran it
uncaptured, both would wait for a collective forever. So these decisions are reduced over all ranks, at the beginning
and the end of a call to `generate` and whenever a step is recorded or compared. A replayed step needs no reduction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_rocm.weights.tensor_parallel import mesh_of


class Agreement:
    """Agreement among the ranks that a model's layers are sharded over; trivial for a model on one rank.

    group: the process group of these ranks, whose collectives a step contains, or None for a single rank.
    """

    def __init__(self, model: nn.Module) -> None:
        mesh = mesh_of(model)
        self.group: Any = None if mesh is None else mesh.get_group()
        self._device = None if mesh is None else next(model.parameters()).device

    def all(self, value: bool) -> bool:
        """Return whether the value is True on every rank."""
        return value if self.group is None else self._least(int(value)) == [1]

    def same(self, *numbers: int) -> bool:
        """Return whether the numbers are the same on every rank."""
        if self.group is None:
            return True
        least = self._least(*numbers, *(-number for number in numbers))
        half = len(numbers)
        return all(low == -high for low, high in zip(least[:half], least[half:], strict=True))

    def _least(self, *numbers: int) -> list[int]:
        import torch.distributed as dist

        with torch.inference_mode(False), torch.no_grad():
            values = torch.tensor(numbers, device=self._device)
            dist.all_reduce(values, dist.ReduceOp.MIN, group=self.group)
        least: list[int] = values.tolist()
        return least
