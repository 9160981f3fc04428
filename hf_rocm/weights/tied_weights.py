"""Find shared weights of a model: one parameter in two modules, or two tensors in the same memory.

Fusing moves a weight. A tensor that still uses the old memory would no longer change with the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn


class _Place(NamedTuple):
    """The memory range of a tensor's storage, and the tensor's name in the model."""

    device: str
    start: int
    end: int
    name: str
    tensor: Tensor


def shared(model: nn.Module) -> dict[int, str]:
    """Map the id of every parameter or buffer that shares memory or has two names to a sentence about it.

    Tensor subclasses, sparse tensors and tensors on the meta device are left out.
    """
    sentences: dict[int, str] = {}
    last: _Place | None = None
    for place in sorted(_places(model), key=lambda place: place[:4]):
        if last is not None and place.device == last.device and place.start < last.end:
            sentence = f"{last.name} and {place.name} share memory"
            sentences.setdefault(id(place.tensor), sentence)
            sentences.setdefault(id(last.tensor), sentence)
            if place.end <= last.end:
                continue
        last = place
    return sentences


def first_shared(parameters: Iterable[Tensor | None], others: dict[int, str]) -> str | None:
    """Return the sentence about the first shared parameter, or None. others: the result of `shared` for the model."""
    return next((others[id(parameter)] for parameter in parameters if id(parameter) in others), None)


def _places(model: nn.Module) -> Iterator[_Place]:
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in tensors:
        if type(tensor) not in (nn.Parameter, Tensor) or tensor.is_meta or tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start:
            yield _Place(str(tensor.device), start, start + storage.nbytes(), name, tensor)
