"""Ranks that share a model's layers take every decision of graph decode together.

A recorded step holds the collectives of its rank. If one rank replayed and recorded, or compared, while another ran the
step as ever, they would wait for each other's collectives in vain. What each of them finds is therefore reduced over
the ranks: once in each call of `generate`, and where a step is recorded or checked; a replayed step has none of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_rocm.weights.colwise import mesh_of


class Agreement:
    """Among the ranks that this model's layers are sharded over; a model of one rank agrees with itself.

    group: of those ranks, whose collectives a step has; None if there is one rank.
    """

    def __init__(self, model: nn.Module) -> None:
        mesh = mesh_of(model)
        self.group: Any = None if mesh is None else mesh.get_group()
        self._device = None if mesh is None else next(model.parameters()).device

    def all(self, found: bool) -> bool:
        """Whether every rank found it so."""
        return found if self.group is None else self._least(int(found)) == [1]

    def same(self, *numbers: int) -> bool:
        """Whether every rank has these numbers."""
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
