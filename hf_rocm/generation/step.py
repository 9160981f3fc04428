"""The arguments of a decode step, split into the tensors that change and a key for everything that must not change.

A recorded step reads its inputs from the addresses that they had when it was recorded. So the tensors of every step are
copied to these addresses, except `resident` ones, whose address never changes. Everything else (flags, shapes,
strides, dtypes, devices) is part of the recording's key.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm.generation.static_buffers import resident


class Inputs(NamedTuple):
    """The arguments of one step: its tensors, and a key for everything else."""

    tensors: tuple[Tensor, ...]
    key: tuple[Hashable, ...]


class Unrecordable(Exception):
    """Raised if a step can't be recorded. The message is the reason, as a sentence."""


def take_apart(arguments: Mapping[str, Any], ignored: Sequence[object] = ()) -> Inputs:
    """Split a forward's keyword arguments, including nested dicts, into tensors and a key for everything else.

    ignored: objects that the caller checks itself, such as the cache. Raises `Unrecordable` for a tensor that
    requires gradients, and for objects other than tensors, dicts and plain values.
    """
    tensors: list[Tensor] = []
    key = [_add(name, value, tensors, ignored) for name, value in arguments.items()]
    return Inputs(tuple(tensors), tuple(key))


def alike(arguments: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Return whether the arguments of two steps are the same objects, including those in nested dicts."""
    if len(arguments) != len(others):
        return False
    for name, value in arguments.items():
        other = others.get(name, others)
        if value is not other and not (type(value) is type(other) is dict and alike(value, other)):
            return False
    return True


def put_together(arguments: Mapping[str, Any], tensors: Sequence[Tensor], ignored: Sequence[object] = ()) -> Any:
    """The inverse of `take_apart`: the same arguments with these tensors, in the order of `Inputs.tensors`."""
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
    if any(value is one for one in ignored):
        return (name,)
    if type(value) is dict:
        return (name, tuple(_add(str(key), item, tensors, ignored) for key, item in value.items()))
    raise Unrecordable(f"the step's {name} is of type {type(value).__name__}")


def _form(tensor: Tensor) -> Hashable:
    return resident(tensor) or (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def _rebuilt(value: Any, rest: list[Tensor], ignored: Sequence[object]) -> Any:
    if isinstance(value, Tensor):
        return rest.pop(0)
    if any(value is one for one in ignored):
        return value
    if type(value) is dict:
        return {name: _rebuilt(item, rest, ignored) for name, item in value.items()}
    return value


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or the name of its class if there is no text."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
