"""Split the output of a forward into tensors and a structure from which equal outputs are built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_rocm.generation.step import Unrecordable

Form = Callable[[Sequence[Tensor], Sequence[Tensor]], Any]

_PLAIN = (bool, int, float, str, type(None), torch.dtype)


class Outputs:
    """The output of one forward.

    tensors: its tensors, without duplicates. build(tensors, inputs) returns the same output with these tensors; parts
    that were inputs of the call are taken from `inputs`. The constructor raises `Unrecordable` if a part of the output
    is a view of an input or a weight, or is not a dense real tensor, a plain value or a container of these.
    """

    def __init__(self, output: Any, inputs: Sequence[Tensor], weights: Iterable[Tensor]) -> None:
        self.tensors: list[Tensor] = []
        self._inputs = inputs
        self._storages = {tensor.untyped_storage()._cdata for tensor in (*inputs, *weights)}
        self.build: Form = self._form(output, "its output")
        del self._inputs

    def _form(self, value: Any, name: str) -> Form:
        if isinstance(value, Tensor):
            return self._tensor(value, name)
        if isinstance(value, _PLAIN):
            return lambda tensors, inputs: value
        kind: Any = type(value)
        if isinstance(value, dict) and kind.__module__.partition(".")[0] in ("builtins", "collections", "transformers"):
            fields = {key: self._form(item, str(key)) for key, item in value.items()}
            if kind.__module__.startswith("transformers.") and hasattr(kind, "__dataclass_fields__"):
                return lambda tensors, inputs: kind(**_built(fields, tensors, inputs))
            return lambda tensors, inputs: kind(_built(fields, tensors, inputs))
        if kind in (tuple, list):
            items = [self._form(item, name) for item in value]
            return lambda tensors, inputs: kind([item(tensors, inputs) for item in items])
        raise Unrecordable(f"it returns {name} as {kind.__name__}")

    def _tensor(self, tensor: Tensor, name: str) -> Form:
        if tensor.__class__ is not Tensor or tensor.is_complex() or tensor.layout is not torch.strided:
            raise Unrecordable(f"it returns {name} as {type(tensor).__name__} of dtype {tensor.dtype}")
        for index, known in enumerate(self._inputs):
            if known is tensor:
                return lambda tensors, inputs: inputs[index]
        if tensor.untyped_storage()._cdata in self._storages:
            raise Unrecordable(f"it returns {name} as a view of an input or a weight")
        for index, known in enumerate(self.tensors):
            if known is tensor:
                return lambda tensors, inputs: tensors[index]
        self.tensors.append(tensor)
        number = len(self.tensors) - 1
        return lambda tensors, inputs: tensors[number]


def _built(fields: dict[Any, Form], tensors: Sequence[Tensor], inputs: Sequence[Tensor]) -> dict[Any, Any]:
    return {key: form(tensors, inputs) for key, form in fields.items()}
