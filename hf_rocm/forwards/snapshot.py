"""The state of a model on which its recorded forwards depend. Comparing it is cheap enough for every call.

A replay does not run the model's Python code. So everything that this code reads from the model is compared before the
results of a replay are used: its modules and their attributes, hooks, configs, the addresses and shapes of its weights,
and the functions that its classes call. In-place writes to weights need no comparison, because a replay reads the
weights themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm.generation.states import NOTES
from hf_rocm.generation.watch import watches_of

# The attributes of `nn.Module` itself on which a forward without gradients depends.
_READ = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "training")
_OWN = frozenset(nn.Module().__dict__) - set(_READ)

# Attributes on which no recorded forward depends: records that hf_rocm and transformers store in modules, and the other
# attributes of `nn.Module` itself.
_NOTES = NOTES | _OWN

# The comparisons of plain values, containers (whose contents are compared separately), methods, and by identity. They
# are in a tuple, because the `__eq__` of some classes in C++ is not hashable.
_COMPARISONS: tuple[Any, ...] = tuple(
    kind.__eq__
    for kind in (object, int, float, str, torch.dtype, torch.device, dict, OrderedDict, list, tuple, set, MethodType)
)

_FORM = attrgetter("shape", "dtype")

# The guards of torch.compile compare the shapes, strides and dtypes of all tensors in one call, in a quarter of the
# time that Python code takes.
_guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


class Snapshot:
    """The state of one model. tensors: its weights and every other tensor among its attributes.

    number: its number among the snapshots of the model. refused: why its state can't be compared, or None. The model
    references its snapshots, so a snapshot references the parts of the model, but neither the model nor its `__dict__`.
    """

    def __init__(self, model: nn.Module, number: int) -> None:
        self.number = number
        self._kind = type(model)
        self._watch = watches_of(model).call
        modules = list(model.modules())
        self._parts = modules[1:]
        self._kinds = [type(module) for module in self._parts]
        self._classes: list[Any] = list(dict.fromkeys((self._kind, *self._kinds)))
        self._forwards = self._current_forwards()
        self._live: list[Any] = []
        self._copies: list[Any] = []
        self.tensors: list[Tensor] = []
        self.refused: str | None = None
        # (container, name, value) of values that == would compare by value: tensors of one element, objects of classes
        # with their own `__eq__`, and containers of such values.
        self._by_identity: list[tuple[Any, Any, Any]] = []
        seen: set[int] = set()
        # The attributes of the model itself, and those of them that are compared by identity.
        self._own = _without_notes(model.__dict__)
        self._add(self._own, self._own, seen)
        self._own_by_identity = [(name, value) for holder, name, value in self._by_identity if holder is self._own]
        self._by_identity = [item for item in self._by_identity if item[0] is not self._own]
        for module in self._parts:
            own = module.__dict__
            self._add(own, _without_notes(own), seen)
            self._live.append(own)
            self._copies.append(dict(own))
        self._empty = [live for live, copy in zip(self._live, self._copies, strict=True) if not copy]
        filled = [(live, copy) for live, copy in zip(self._live, self._copies, strict=True) if copy]
        self._live, self._copies = [live for live, _ in filled], [copy for _, copy in filled]
        # The dicts of modules, which may also contain notes.
        self._of_modules = {id(module.__dict__) for module in self._parts}
        # The order of children, hooks and other items matters, unlike that of attributes, but == ignores it.
        self._ordered = [live for live in self._live if isinstance(live, dict) and id(live) not in self._of_modules]
        self._keys = [*chain.from_iterable(self._ordered)]
        self.pointers = self._pointers()
        self._forms = self._described()
        # Whether inference mode is enabled → the guards that were created in this mode.
        self._guards: dict[bool, Any] = {}

    def _add(self, holder: Any, values: Any, seen: set[int]) -> None:
        """Add the contents of a container, including nested containers and configs."""
        items = list(values.items()) if isinstance(values, dict) else list(enumerate(values))
        for name, value in items:
            if isinstance(value, Tensor):
                reason = _refuses(value)
                if reason is not None:
                    self.refused = f"{name} {reason}"
                    continue
                if id(value) not in seen:
                    seen.add(id(value))
                    self.tensors.append(value)
                if value.numel() <= 1:
                    self._by_identity.append((holder, name, value))
                continue
            if type(value).__eq__ not in _COMPARISONS:
                self._by_identity.append((holder, name, value))
            inner = value if isinstance(value, (dict, list, tuple, set)) else _settings(value)
            if inner is None or id(inner) in seen:
                continue
            seen.add(id(inner))
            if not isinstance(inner, tuple):
                self._live.append(inner)
                self._copies.append(inner.copy())
            if not isinstance(inner, set):
                before = len(self._by_identity)
                self._add(inner, inner, seen)
                if len(self._by_identity) > before:
                    self._by_identity.append((holder, name, value))

    def in_place(self) -> bool:
        """Return whether all weights are at the same addresses, so that a replay reads the model's memory."""
        return self._pointers() == self.pointers

    def unchanged(self, model: nn.Module) -> bool:
        """Return whether the state is unchanged, apart from the tensors' addresses, which `in_place` compares."""
        own = _without_notes(model.__dict__)
        try:
            return (
                _equal(self._live, self._copies)
                and _equal(own, self._own)
                and _equal([*chain.from_iterable(self._ordered)], self._keys)
                and not any(self._empty)
                and type(model) is self._kind
                and [type(module) for module in self._parts] == self._kinds
                and all(holder[name] is value for holder, name, value in self._by_identity)
                and all(own[name] is value for name, value in self._own_by_identity)
                and self._same_forms()
                and self._current_forwards() == self._forwards
                and self._watch.holds()
            ) or self._only_notes_changed(model)
        except (RuntimeError, LookupError, TypeError, ValueError):
            # An attribute was removed or has another type.
            return False

    def _only_notes_changed(self, model: nn.Module) -> bool:
        """Return whether only notes of modules inside the model differ. Updates the stored notes."""
        differing = [
            index
            for index, (now, before) in enumerate(zip(self._live, self._copies, strict=True))
            if not _equal(now, before)
        ]
        for index in differing:
            live = self._live[index]
            if id(live) not in self._of_modules:
                return False
            if not _equal(_without_notes(live), _without_notes(self._copies[index])):
                return False
            self._copies[index] = dict(live)
        return bool(differing) and self.unchanged(model)

    def same_weights(self, other: Snapshot) -> bool:
        """Return whether both snapshots have the same tensors at the same addresses.

        If so, recordings for the older snapshot may be used again.
        """
        return self.pointers == other.pointers and [*map(id, self.tensors)] == [*map(id, other.tensors)]

    def _current_forwards(self) -> list[Any]:
        """Return the forwards of the classes, including hf_rocm's changes, which `Watch` ignores."""
        # The class of a scripted module has none.
        return [getattr(cls, "forward", None) for cls in self._classes]

    def _pointers(self) -> list[int]:
        return [*map(Tensor.data_ptr, self.tensors)]

    def _same_forms(self) -> bool:
        """Return whether all tensors have kept their shapes, strides and dtypes. Guards compare further properties."""
        mode = torch.is_inference_mode_enabled()
        guard = self._guards.get(mode)
        if guard is not None and guard.check(*self.tensors):
            return True
        if self._described() != self._forms:
            return False
        if _guards is not None:
            self._guards[mode] = _guards(*self.tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        return True

    def _described(self) -> list[Any]:
        return [*map(_FORM, self.tensors), *map(Tensor.stride, self.tensors)]


def refuses_weights(model: nn.Module) -> str | None:
    """Return why the addresses of this model's weights can't be compared, or None."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        reason = _refuses(tensor)
        if reason is not None:
            return f"{name} {reason}"
    return None


def _refuses(tensor: Tensor) -> str | None:
    if tensor.__class__ not in (nn.Parameter, Tensor):
        return f"is of type {type(tensor).__name__}"
    if tensor.layout is not torch.strided:
        return "is sparse" if "sparse" in str(tensor.layout) else f"has the layout {tensor.layout}"
    return "is nested" if tensor.is_nested else None


def _settings(value: Any) -> dict[str, Any] | None:
    """Return the attributes of a config, or None for any other value."""
    from transformers import PretrainedConfig

    return value.__dict__ if isinstance(value, PretrainedConfig) else None


def _equal(now: list[Any] | dict[Any, Any], before: list[Any] | dict[Any, Any]) -> bool:
    """Return whether now == before. If a comparison of two values fails, they differ."""
    try:
        return now == before
    except Exception:  # noqa: BLE001  only values are compared here: tensors, which raise, and objects of users
        return False


def _without_notes(own: dict[str, Any]) -> dict[str, Any]:
    attributes = own.copy()
    for name in _NOTES:
        attributes.pop(name, None)
    return attributes
