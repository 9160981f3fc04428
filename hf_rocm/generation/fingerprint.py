"""What a recorded step took for granted of its model: where its weights lie, and how its modules are set.

A replay runs no Python of the model. So before the first step of every call the model is looked over: a weight that
moved, a hook, an adapter that was switched, another implementation of attention or experts gives another fingerprint,
and recordings with this one are left alone. What is written into weights in place is seen by a replay anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from hf_rocm.weights.kept import FUSED, SHUFFLED, Kept


class Fingerprint(NamedTuple):
    """Equal while the recordings made under it are good."""

    facts: tuple[Hashable, ...]
    kept: tuple[object, ...]  # objects that are told by their identity, which must not be given to others meanwhile

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fingerprint) and self.facts == other.facts

    def __hash__(self) -> int:
        return hash(self.facts)


def fingerprint(model: nn.Module) -> Fingerprint:
    """Look the model over: a few microseconds for each module."""
    from hf_rocm import options

    kept: list[object] = [options.current()]
    facts: list[Hashable] = [id(kept[0]), *_circumstances()]
    if getattr(model, "config", None) is not None:
        facts.append(_settings(model.config))
    seen: set[int] = set()
    waiting: list[nn.Module] = [model]
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        facts += (_Identity(module), _Identity(type(module)))
        _add_attributes(module, facts, kept)
        waiting += [child for child in module._modules.values() if child is not None]
    return Fingerprint(tuple(facts), tuple(kept))


# What `nn.Module` itself keeps, what is looked at apart, and what transformers changes without any effect on a step.
_IGNORED = frozenset(nn.Module().__dict__) | {
    "config",
    "generation_config",
    "_cache",
    "_compiled_call",
    "_last_compile_config",
    "_previous_max_cache_length",
    "_hf_rocm_stayed",
    "_hf_rocm_report",
    "_hf_rocm_inputs_note",
}

_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def _add_attributes(module: nn.Module, facts: list[Hashable], kept: list[object]) -> None:
    own = module.__dict__
    facts.append(own["training"])
    if SHUFFLED in own or FUSED in own:
        facts += _copies(module, kept)
    for parameters in (own["_parameters"], own["_buffers"]):
        facts += [None if each is None else _place(each) for each in parameters.values()]
    for hooks in (own["_forward_hooks"], own["_forward_pre_hooks"]):
        if hooks:
            facts += [_fact(each, kept) for each in hooks.values()]
    for name in own.keys() - _IGNORED:
        value = own[name]
        facts.append(name)
        if isinstance(value, dict):
            facts += [(str(key), _fact(each, kept)) for key, each in value.items()]
        elif isinstance(value, (list, tuple)):
            facts += [_fact(each, kept) for each in value]
        else:
            facts.append(_fact(value, kept))


def _copies(module: nn.Module, kept: list[object]) -> list[Hashable]:
    """Shuffled copies of its weights that are in use. After a write the prompt brings them up to date, in place."""
    own = module.__dict__
    found = (own.get(SHUFFLED), getattr(own.get(FUSED), "kept", None))
    kept += found
    return [(id(each), each.shuffled is None) for each in found if isinstance(each, Kept)]


def _fact(value: Any, kept: list[object]) -> Hashable:
    if isinstance(value, Tensor):
        return _place(value)
    if isinstance(value, _PLAIN):
        return value
    if type(value) in (list, tuple):
        return tuple(_fact(each, kept) for each in value)
    if type(value) is dict:
        return tuple((str(key), _fact(each, kept)) for key, each in value.items())
    try:
        return _Identity(value)
    except TypeError:  # it can't be referred to weakly
        kept.append(value)
        return id(value)


class _Identity:
    """One object, told from every other by its identity and held weakly: equal to itself for as long as it lives."""

    __slots__ = ("_hash", "_refer")

    def __init__(self, value: Any) -> None:
        self._refer = weakref.ref(value)
        self._hash = id(value)

    def __eq__(self, other: object) -> bool:
        mine = self._refer()
        return mine is not None and isinstance(other, _Identity) and mine is other._refer()

    def __hash__(self) -> int:
        return self._hash


def _place(tensor: Tensor) -> Hashable:
    shard = getattr(tensor, "_local_tensor", None)  # of a DTensor
    if shard is not None:
        return id(tensor), _place(shard)
    if tensor.__class__ not in (nn.Parameter, Tensor):
        try:
            pointer = tensor.data_ptr()
        except (RuntimeError, NotImplementedError):  # it has no memory of its own
            pointer = 0
        return id(tensor), type(tensor), getattr(tensor, "_version", 0), pointer
    return tensor.data_ptr(), tensor.shape, tensor.dtype


def _settings(config: Any) -> Hashable:
    """Every plain value of a config and of those inside it: attention's implementation, a softcap, ...."""
    if isinstance(config, _PLAIN):
        return config
    if isinstance(config, (list, tuple)):
        return tuple(_settings(each) for each in config)
    inner = config if isinstance(config, dict) else getattr(config, "__dict__", None)
    if inner is None:
        return type(config).__qualname__
    return tuple((str(name), _settings(each)) for name, each in inner.items())


def _circumstances() -> list[Hashable]:
    hooks = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
    return [
        torch.is_autocast_enabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_float32_matmul_precision(),
        tuple(id(each) for hook in hooks for each in hook.values()),
    ]
