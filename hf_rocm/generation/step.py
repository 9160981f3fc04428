"""What goes into a decode step, told apart: the tensors that change, and everything that a recording takes for granted.

A recorded step reads its inputs where they lay when it was recorded, so each step's tensors are copied there, except
those that are `resident` and never leave their place. All else (flags, shapes, strides, which kernels a mask leads to)
is part of the recording's key.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from hf_rocm.generation.resident import resident


@runtime_checkable
class Carrier(Protocol):
    """An argument that is no tensor but carries some to the device: a mask that is given as lengths, say.

    Between two steps with equal `recorded_key()` only what its tensors hold may differ.
    """

    def recorded_key(self) -> Hashable:
        """Everything that decides which kernels run, besides shapes and dtypes of the tensors."""

    def tensors(self) -> Sequence[Tensor]:
        """The tensors that kernels read, in a fixed order."""

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        """The same argument over other tensors of the same shapes: the recording's own."""


class Inputs(NamedTuple):
    """The arguments of one step, taken apart."""

    tensors: tuple[Tensor, ...]
    key: tuple[Hashable, ...]


class Unrecordable(Exception):
    """An argument whose influence on the step can't be told; the message is a sentence."""


def take_apart(arguments: Mapping[str, Any], ignored: Sequence[object] = ()) -> Inputs:
    """The tensors among a forward's keyword arguments, also in dicts and carriers, and a key for all else.

    ignored: objects that the caller answers for, such as the cache. Raises `Unrecordable` on anything that is neither
    a tensor, nor a carrier, nor a plain value.
    """
    tensors: list[Tensor] = []
    key = [_add(name, value, tensors, ignored) for name, value in arguments.items()]
    return Inputs(tuple(tensors), tuple(key))


def put_together(arguments: Mapping[str, Any], tensors: Sequence[Tensor], ignored: Sequence[object] = ()) -> Any:
    """The same arguments over other tensors, in the order in which `take_apart` found them."""
    rest = list(tensors)
    return {name: _rebuilt(value, rest, ignored) for name, value in arguments.items()}


def _add(name: str, value: Any, tensors: list[Tensor], ignored: Sequence[object]) -> Hashable:
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise Unrecordable(f"the step's {name} requires gradients")
        tensors.append(value)
        return (name, _form(value))
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return (name, type(value), value)
    if any(value is each for each in ignored):
        return (name,)
    if type(value) is dict:
        return (name, tuple(_add(str(inner), each, tensors, ignored) for inner, each in value.items()))
    if isinstance(value, Carrier):
        carried = tuple(value.tensors())
        tensors += carried
        return (name, type(value), value.recorded_key(), tuple(_form(each) for each in carried))
    raise Unrecordable(f"the step's {name} is a {type(value).__name__}")


def _form(tensor: Tensor) -> Hashable:
    return resident(tensor) or (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def _rebuilt(value: Any, rest: list[Tensor], ignored: Sequence[object]) -> Any:
    if isinstance(value, Tensor):
        return rest.pop(0)
    if any(value is each for each in ignored):
        return value
    if type(value) is dict:
        return {name: _rebuilt(each, rest, ignored) for name, each in value.items()}
    if isinstance(value, Carrier):
        own = [rest.pop(0) for _ in value.tensors()]
        return value.with_tensors(own)
    return value
