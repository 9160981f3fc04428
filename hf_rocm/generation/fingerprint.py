"""The state of a model that a recorded step depends on: addresses of weights, settings of modules, called functions.

A replay runs none of the model's Python code. So the model is fingerprinted before the first step of every call. The
fingerprint changes if a weight is moved, if a hook is added, or if the active adapter or the implementation of
attention or experts changes. Recordings with a different fingerprint are not used. A replay reads the weights
themselves, so values that were written in place take effect.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_rocm.generation.states import NOTES
from hf_rocm.generation.watch import Watches, attributes_of, modules_of
from hf_rocm.layers.weight_group import SLOT, WeightGroup


class Fingerprint(NamedTuple):
    """A fingerprint of a model. A recording is used only if the model's fingerprint equals that of the recording.

    facts: the compared values. kept: the objects that are compared by id; they are referenced so that no id is reused.
    """

    facts: tuple[Hashable, ...]
    kept: tuple[object, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fingerprint) and self.facts == other.facts

    def __hash__(self) -> int:
        return hash(self.facts)


def fingerprint(model: nn.Module, watches: Watches) -> Fingerprint:
    """Fingerprint the model, in a few microseconds per module. watches: the result of `watches_of` for this call."""
    from hf_rocm import options

    options.refresh()
    kept: list[object] = [options.current(), watches.call]
    facts: list[Hashable] = [id(kept[0]), *map(id, watches.call.expected), torch.is_autocast_enabled()]
    facts += [torch.is_grad_enabled(), *surroundings()]
    numbers: dict[int, int] = {}
    for module in modules_of(model):
        if "config" in module.__dict__:
            _add_config(module.__dict__["config"], numbers, facts, kept)
        kept.append(type(module))
        facts += (_identity(module), id(type(module)))
        _add_attributes(module, facts, kept)
    return Fingerprint(tuple(facts), tuple(kept))


def _add_config(config: Any, numbers: dict[int, int], facts: list[Hashable], kept: list[object]) -> None:
    """Add which config a module has, and the config's settings the first time.

    numbers: the id of a config → its number. An equal copy of a model's only config changes nothing.
    """
    if id(config) in numbers:
        facts.append(numbers[id(config)])
        return
    numbers[id(config)] = len(numbers)
    kept.append(config)
    facts.append(_settings(config, kept))


# Attributes that are handled separately, and attributes that don't affect a step.
_IGNORED = frozenset(
    (
        "config",
        "generation_config",
        "_cache",
        "_previous_max_cache_length",
        *NOTES,
    )
)

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_PLAIN_CLASSES = frozenset(_PLAIN)


def _add_attributes(module: nn.Module, facts: list[Hashable], kept: list[object]) -> None:
    own = module.__dict__
    facts.append(own["training"])
    if SLOT in own:
        facts += _shuffled(module, kept)
    facts += own["_modules"]
    for parameters in (own["_parameters"], own["_buffers"]):
        if parameters:
            facts += parameters
            facts += [None if tensor is None else _place(tensor) for tensor in parameters.values()]
    for hooks in (own["_forward_hooks"], own["_forward_pre_hooks"]):
        if hooks:
            facts += [_fact(hook, kept) for hook in hooks.values()]
    # Reading a weight may detach its group, which is one of these attributes.
    names = attributes_of(module, without=_IGNORED)
    facts.append(names)
    for name in names:
        value = own[name]
        if value.__class__ in _PLAIN_CLASSES:
            facts.append(value)
        elif isinstance(value, dict):
            facts += [(str(key), _fact(item, kept)) for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            facts += [_fact(item, kept) for item in value]
        else:
            facts.append(_fact(value, kept))


def _shuffled(module: nn.Module, kept: list[object]) -> list[Hashable]:
    """The address of the shuffled copy in use. After a write to the weight, the next prompt updates the copy."""
    group = module.__dict__[SLOT]
    data = group.shuffled_data(module) if isinstance(group, WeightGroup) else None
    kept.append(data)
    return [None if data is None else data.data_ptr()]


def _fact(value: Any, kept: list[object], containers: tuple[int, ...] = ()) -> Hashable:
    """What is compared of a value. containers: the ids of the lists and dicts that it is in."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return _place(value)
    if type(value) in (list, tuple, dict):
        if id(value) in containers:
            return "contains itself", containers.index(id(value))
        containers = (*containers, id(value))
        if type(value) is dict:
            return tuple((str(key), _fact(item, kept, containers)) for key, item in value.items())
        return tuple(_fact(item, kept, containers) for item in value)
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


def _place(tensor: Tensor) -> Hashable:
    if tensor.__class__ in (nn.Parameter, Tensor) and tensor.layout is torch.strided and not tensor.is_nested:
        return tensor.data_ptr(), tensor.shape, tensor.dtype
    # The local part of a DTensor.
    shard = getattr(tensor, "_local_tensor", None)
    if shard is not None:
        return _identity(tensor), _place(shard)
    try:
        pointer = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        # The tensor has no storage.
        pointer = 0
    return _identity(tensor), type(tensor), getattr(tensor, "_version", 0), pointer


def _settings(config: Any, kept: list[object], containers: tuple[int, ...] = ()) -> Hashable:
    """Every plain value of a config and of its nested configs, such as the attention implementation or a softcap.

    containers: the ids of the objects that it is in.
    """
    if isinstance(config, _PLAIN):
        return config
    if isinstance(config, (nn.Module, Tensor, type, Enum)):
        return _fact(config, kept)
    if id(config) in containers:
        return "contains itself", containers.index(id(config))
    containers = (*containers, id(config))
    if isinstance(config, (list, tuple)):
        return tuple(_settings(item, kept, containers) for item in config)
    inner = config if isinstance(config, dict) else getattr(config, "__dict__", None)
    if inner is None:
        return type(config).__qualname__
    return tuple((str(name), _settings(value, kept, containers)) for name, value in inner.items())


def surroundings() -> tuple[Hashable, ...]:
    """The state of PyTorch on which the kernels of a step or forward depend, without autocast and gradients."""
    cuda = torch.backends.cuda
    return (
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.enabled,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        torch.get_default_device() if torch._C._len_torch_function_stack() else None,
    )


class Writes:
    """In-place writes to a model's weights and buffers, but not those through `.data` or to inference tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._count = _writes_to(model)

    def none_since(self, model: nn.Module) -> bool:
        """Return whether there was no write since the last call of this method, or since this object was created."""
        before, self._count = self._count, _writes_to(model)
        return before == self._count


def _writes_to(model: nn.Module) -> int:
    count = 0
    for module in modules_of(model):
        own = module.__dict__
        for tensors in (own["_parameters"], own["_buffers"]):
            for tensor in tensors.values():
                if tensor is not None and not tensor.is_inference():
                    count += tensor._version
    return count
