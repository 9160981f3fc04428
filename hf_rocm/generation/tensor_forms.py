"""The classes, shapes, strides, dtypes and devices of tensors, compared in one call.

The guards of torch.compile compare them in a quarter of the time that Python code takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

_guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)

_FORM = attrgetter("__class__", "shape", "dtype", "device")


class Forms:
    """The forms of these tensors. The tensors are not referenced."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.values = _described(tensors)
        self._made: dict[bool, Any] = {}  # whether inference mode is enabled → its guards
        self._make_guards(tensors)

    def same(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these tensors have the same forms. Guards compare further properties."""
        guards = self._made.get(torch.is_inference_mode_enabled())
        if guards is not None and guards.check(*tensors):
            return True
        if _described(tensors) != self.values:
            return False
        self._make_guards(tensors)
        return True

    def _make_guards(self, tensors: Sequence[Tensor]) -> None:
        if _guards is not None:
            made = _guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            self._made[torch.is_inference_mode_enabled()] = made


def _described(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return (*map(_FORM, tensors), *map(Tensor.stride, tensors))
