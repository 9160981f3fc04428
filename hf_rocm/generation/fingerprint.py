"""The state of a model that a recorded step depends on: addresses of weights, settings of modules, called functions.

A replay runs none of the model's Python code. So the model is compared with its last snapshot when a call begins, and
again before the first step. It differs if a weight was moved, if a hook was added, or if the active adapter or the
implementation of attention or experts has changed. Recordings with a different fingerprint are not used. A replay reads
the weights themselves, so values that were written in place take effect.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain, compress
from operator import getitem, is_, itemgetter, not_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hf_rocm import options
from hf_rocm.generation.facts import FUNCTIONS, PLAIN, fact, global_state, is_exact, place_of, settings_of
from hf_rocm.generation.tensor_forms import Forms
from hf_rocm.generation.watch import Watches, attributes_of, key_of, modules_of
from hf_rocm.layers.weight_group import SLOT, WeightGroup
from hf_rocm.overlay.replacements import Watch


class Fingerprint(NamedTuple):
    """A fingerprint of a model. A recording is used only if the model's fingerprint equals that of the recording.

    functions: the ids of the functions that the model's classes call. kept: the watch that references these functions.
    """

    snapshot: Snapshot
    functions: tuple[int, ...]
    kept: Watch

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fingerprint) and self[:2] == other[:2]

    def __hash__(self) -> int:
        return hash(self[:2])


def fingerprint(model: nn.Module, watches: Watches) -> Fingerprint:
    """Fingerprint the model. watches: the result of `watches_of` for this call.

    Returns the same object as the last call if nothing has changed.
    """
    options.refresh()
    snapshot = snapshot_of(model)
    result = snapshot.fingerprint
    if result is None or result.kept is not watches.call:
        result = snapshot.fingerprint = Fingerprint(snapshot, tuple(map(id, watches.call.expected)), watches.call)
    return result


def snapshot_of(model: nn.Module) -> Snapshot:
    """The state of the model now: its last snapshot, if nothing has changed, or a new one."""
    last = _last.get(model)
    if last is not None and last.holds(model):
        return last
    snapshot = Snapshot(model)
    if snapshot.holds(model):
        # No other thread changed the model in the meantime.
        _last[model] = snapshot
    return snapshot


def forget(model: nn.Module) -> None:
    """Drop the last snapshot of a model, which references shuffled copies of its weights."""
    _last.pop(model, None)


_last: WeakKeyDictionary[nn.Module, Snapshot] = WeakKeyDictionary()

# Attributes that don't affect a step.
_IGNORED = frozenset(
    (
        "generation_config",
        "_cache",
        "_compiled_call",
        "_last_compile_config",
        "_previous_max_cache_length",
        "_hf_rocm_stayed",
        "_hf_rocm_report",
        "_hf_rocm_inputs_note",
    )
)

# The attributes of every `nn.Module`: those that are compared, and all others. The latter must exist: a name was added
# to a module if it has more attributes than before, or as many although a known one is missing.
_COMPARED = ("training", "_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")
_compared = itemgetter(*_COMPARED)
_not_compared = itemgetter(*sorted({*nn.Module().__dict__} - {*_COMPARED}))


class _Attributes:
    """Attributes of modules that are compared in the same way. places: the index of the module, and the name."""

    def __init__(self, places: list[tuple[int, str]]) -> None:
        self.places = tuple(places)
        self._indices = [index for index, _ in places]
        self._names = [name for _, name in places]

    def values(self, owns: list[dict[str, Any]]) -> Iterator[Any]:
        """Read the attributes. owns: the `__dict__`s of all modules."""
        return map(getitem, map(owns.__getitem__, self._indices), self._names)


class _Reading(NamedTuple):
    """What `Snapshot` compares. The tensors are compared by `Forms`.

    names: the numbers of the modules' attributes, and the names in modules that have ignored ones. identities: classes,
    and weak references, of which Python keeps one per object. plain: numbers, strings and dtypes. kept: objects whose
    ids or addresses are in `values`.
    """

    names: list[object]
    identities: list[object]
    plain: Iterable[object]
    values: tuple[Hashable, ...]
    kept: list[object]


class Snapshot:
    """The state of a model, except for the functions that its classes call. Two snapshots are equal if the states are.

    `holds` takes a third of the time of a new snapshot, because the attributes are already sorted by how they are
    compared, and most of them are compared by identity. A snapshot references plain values, classes, the options,
    shuffled copies, and objects that don't support weak references; it references nothing else of the model strongly.

    devices: those of the parameters. key: what determines the functions that are called, see `watches_of`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.fingerprint: Fingerprint | None = None  # the last one
        # the functions on which the result of `decide.windows` depends, and the result
        self.windows: tuple[Watch, Sequence[int | None]] | None = None
        modules = modules_of(model)
        owns = [*map(vars, modules)]
        self._live = [*map(weakref.ref, modules)]
        self._groups = [index for index, own in enumerate(owns) if SLOT in own]
        # Reading a weight may detach its group, which is one of the attributes.
        _shuffled(owns, self._groups, self._live)
        tensors = [tensor for kind in ("_parameters", "_buffers") for tensor in _values([own[kind] for own in owns])]
        self._exact = [*map(is_exact, tensors)]
        self._inexact = [*map(not_, self._exact)]
        self._forms = Forms([*compress(tensors, self._exact)])
        names = [attributes_of(module, without=_IGNORED) for module in modules]
        attributes = [(index, name) for index, of_module in enumerate(names) for name in of_module]
        classes: list[Any] = [type(owns[index][name]) for index, name in attributes]
        sorts = [*map(_sort_of, classes)]
        self._plain, self._referenced, self._others = (
            _Attributes([*compress(attributes, [sort is wanted for sort in sorts])])
            for wanted in (PLAIN, weakref.ref, None)
        )
        # The modules whose number of attributes may change without effect.
        self._noted = [index for index, own in enumerate(owns) if not _IGNORED.isdisjoint(own)]
        reading, _ = self._read(model)
        self._reading = reading._replace(plain=tuple(reading.plain))
        self._facts = self._of_equality()
        self.devices = devices_of(modules)
        self.key = key_of(model, modules)
        first = {type(module): index for index, module in reversed([*enumerate(modules)])}
        functions = [index for index, name in self._referenced.places if owns[index][name].__class__ in FUNCTIONS]
        hooked = [
            index
            for index, own in enumerate(owns)
            if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own
        ]
        self._with_code = sorted({*first.values(), *functions, *hooked, *self._noted})

    def holds(self, model: nn.Module) -> bool:
        """Whether the model is in this state now. May return False if an attribute was replaced by an equal one."""
        before = self._reading
        try:
            now, tensors = self._read(model)
            return (
                now.names == before.names
                and len(now.identities) == len(before.identities)
                and all(map(is_, now.identities, before.identities))
                # A tensor or a user's object may be equal to a number.
                and all(map(is_, now.plain, before.plain))
                and now.values == before.values
                and self._forms.same(tensors)
            )
        except (AttributeError, LookupError, TypeError, RuntimeError):
            # A module was freed, an attribute was removed, or a tensor was replaced by something else.
            return False

    def modules_with_code(self) -> Iterator[nn.Module]:
        """The modules that `decide.refuses_modules` has to examine: one per class, and those with hooks or functions.

        The attributes in `_IGNORED` are not compared, so the modules that have one are included.
        """
        modules = (self._live[index]() for index in self._with_code)
        return (module for module in modules if module is not None)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Snapshot) and self._facts == other._facts)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self._facts)

    def _of_equality(self) -> tuple[Hashable, ...]:
        """Everything that distinguishes snapshots. Some of the names and their number depend on ignored attributes."""
        attributes = self._plain.places, self._referenced.places, self._others.places
        now = self._reading
        return attributes, tuple(map(id, now.identities)), tuple(now.plain), now.values, self._forms.values

    def _read(self, model: Any) -> tuple[_Reading, list[Tensor]]:
        """Read the state, and the tensors that are compared by `Forms`. Raises an error if a module was freed."""
        owns = [reference().__dict__ for reference in self._live]
        kept: list[object] = [options.current()]
        shuffled = _shuffled(owns, self._groups, self._live)
        kept += shuffled
        deque(map(_not_compared, owns), maxlen=0)
        training, children, parameters, buffers, *hooks = zip(*map(_compared, owns), strict=True)
        modules = [module for module in _values(children) if module is not None]
        tensors = [*_values(parameters), *_values(buffers)]
        exact = [*compress(tensors, self._exact)]
        values = (
            id(kept[0]),
            *global_state(kept),
            settings_of(getattr(model, "config", None), kept),
            training,
            (*map(len, children), *map(len, parameters), *map(len, buffers)),
            tuple([(place, fact(hook, kept)) for place, hook in _hooks(hooks)]),
            tuple(map(Tensor.data_ptr, exact)),
            tuple([tensor if tensor is None else place_of(tensor) for tensor in compress(tensors, self._inexact)]),
            tuple([None if data is None else data.data_ptr() for data in shuffled]),
            tuple([fact(value, kept) for value in self._others.values(owns)]),
        )
        identities = [
            type(model),
            *map(type, modules),
            *map(weakref.ref, modules),
            *map(weakref.ref, self._referenced.values(owns)),
        ]
        noted: list[Any] = [self._live[index]() for index in self._noted]
        names = [*map(len, owns), *[attributes_of(module, without=_IGNORED) for module in noted]]
        return _Reading(names, identities, self._plain.values(owns), values, kept), exact


def devices_of(modules: Iterable[nn.Module]) -> frozenset[torch.device]:
    """The devices of all parameters."""
    parameters = _values(module._parameters for module in modules)
    return frozenset([parameter.device for parameter in parameters if parameter is not None])


def _values(dicts: Iterable[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable([values.values() for values in dicts if values])


def _hooks(dicts: Iterable[tuple[dict[int, Any], ...]]) -> Iterator[tuple[int, Any]]:
    """Yield every hook with its place."""
    if any(map(any, dicts)):
        for place, hooks in enumerate(chain(*dicts)):
            yield from ((place, hook) for hook in hooks.values())


@lru_cache(maxsize=256)
def _sort_of(cls: type) -> Any:
    """How attributes of this class are compared: `PLAIN` or `weakref.ref` by identity, None by their contents."""
    if issubclass(cls, PLAIN):
        return PLAIN
    # Objects of some classes can't be referenced weakly.
    by_content = issubclass(cls, (dict, list, tuple, Tensor)) or not cls.__weakrefoffset__
    return None if by_content else weakref.ref


def _shuffled(owns: list[Any], groups: list[int], modules: list[weakref.ref[Any]]) -> list[Tensor | None]:
    """The shuffled copies in use. After a write to a weight, the next prompt updates its copy."""
    slots: list[Any] = [(owns[index][SLOT], modules[index]()) for index in groups]
    return [group.shuffled_data(module) if isinstance(group, WeightGroup) else None for group, module in slots]
