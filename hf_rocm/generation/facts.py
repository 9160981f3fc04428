"""The contents of a model's attributes, hooks and config as hashable values, which are equal if the contents are.

`fingerprint` compares them. It compares most attributes by identity; the contents of all others are read here.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

PLAIN = (bool, int, float, str, type(None), torch.dtype)
_PLAIN_CLASSES = frozenset(PLAIN)
FUNCTIONS = (FunctionType, MethodType, partial)


def is_exact(tensor: Tensor | None) -> bool:
    """Whether a tensor is determined by its address and its form."""
    if tensor is None or tensor.__class__ not in _EXACT:
        return False
    return tensor.layout is torch.strided and not tensor.is_nested


_EXACT = (nn.Parameter, Tensor)


def fact(value: Any, kept: list[object]) -> Hashable:
    """A plain value itself, the contents of a container, the place of a tensor, or the identity of another value.

    Appends to `kept` the objects that don't support weak references, because the result contains only their ids.
    """
    if value.__class__ in _PLAIN_CLASSES or isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return place_of(value)
    if isinstance(value, (list, tuple)):
        return type(value), tuple([fact(item, kept) for item in value])
    if isinstance(value, dict):
        return type(value), tuple([(str(key), fact(item, kept)) for key, item in value.items()])
    try:
        return _identity(value)
    except TypeError:
        # The value does not support weak references.
        kept.append(value)
        return id(value)


def _identity(value: Any) -> Hashable:
    """A weak reference that equals only references to the same object, as long as that object is alive.

    Python keeps one plain `weakref.ref` per object, so creating one is fast. Plain references are not used for classes
    with their own `__eq__` or `__hash__`, because references call these methods.
    """
    cls = type(value)
    return weakref.ref(value) if (cls.__eq__, cls.__hash__) == _BY_IDENTITY else _Identity(value)


_BY_IDENTITY: Any = object.__eq__, object.__hash__


class _Identity:
    """An object's identity, as a weak reference. Two instances are equal while they refer to the same live object."""

    __slots__ = ("_hash", "_reference")

    def __init__(self, value: Any) -> None:
        self._reference = weakref.ref(value)
        self._hash = id(value)

    def __eq__(self, other: object) -> bool:
        value = self._reference()
        return value is not None and isinstance(other, _Identity) and value is other._reference()

    def __hash__(self) -> int:
        return self._hash


def place_of(tensor: Tensor) -> Hashable:
    """The address and the form of a tensor, or what is known about a tensor without storage."""
    if is_exact(tensor):
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    # The local part of a DTensor.
    shard = getattr(tensor, "_local_tensor", None)
    if shard is not None:
        return id(tensor), place_of(shard)
    try:
        pointer = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        # The tensor has no storage.
        pointer = 0
    return id(tensor), type(tensor), getattr(tensor, "_version", 0), pointer, tensor.device


def settings_of(config: Any, kept: list[object]) -> Hashable:
    """Every plain value of a config and of its nested configs, such as the attention implementation or a softcap.

    kept: as for `fact`.
    """
    if config.__class__ in _PLAIN_CLASSES or isinstance(config, PLAIN):
        return config
    if isinstance(config, (list, tuple)):
        return tuple([settings_of(item, kept) for item in config])
    if isinstance(config, FUNCTIONS):
        return fact(config, kept)
    inner = config if isinstance(config, dict) else getattr(config, "__dict__", None)
    cls: Any = type(config)
    if inner is None:
        return cls
    return cls, tuple([(str(name), settings_of(value, kept)) for name, value in inner.items()])


def global_state(kept: list[object]) -> list[Hashable]:
    """The state of PyTorch that a recording depends on."""
    hooks = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
    return [
        torch.is_autocast_enabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_float32_matmul_precision(),
        tuple([fact(hook, kept) for registered in hooks for hook in registered.values()]),
    ]
