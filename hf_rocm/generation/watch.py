"""The functions that the classes of a model call: forwards, functions, methods and registry entries.

A replay runs none of them. So a recorded step is valid only as long as all of them are the same objects as when it was
recorded, and steps are not recorded for a model that calls code from unknown packages.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from hf_rocm.overlay.dependencies import Reference, Registry, of_call, of_class
from hf_rocm.overlay.replacements import Watch, replacement_among

_MASKS = "ALL_MASK_ATTENTION_FUNCTIONS"

# Prefixes of the modules whose functions are compared before each step.
_PER_STEP = ("transformers.models.", "torch.nn.functional")


# Packages whose modules run the same operations in every step, and whose hooks only manage memory or collect outputs.
KNOWN = frozenset(
    (
        "torch",
        "transformers",
        "hf_rocm",
        "peft",
        "accelerate",
        "bitsandbytes",
        "torchao",
        "compressed_tensors",
        "liger_kernel",
    )
)


class Watches(NamedTuple):
    """The functions that a model's classes call, and those that are compared before each step.

    foreign: a sentence that names the first of these functions outside the `KNOWN` packages, or None.
    """

    call: Watch
    step: Watch
    foreign: str | None


def watches_of(model: nn.Module) -> Watches:
    """The functions that this model's classes call now.

    Returns the same object as long as no function is replaced, and the classes and the config's strings stay the same.
    """
    key = frozenset(map(type, modules_of(model))), frozenset(strings_of(getattr(model, "config", None)))
    last = _last.get(model)
    if last is None or last[0] != key or not last[1].call.holds():
        call = Watch(_references(*key), accept_foreign=True)
        step = Watch(filter(_may_change_during_a_call, call.references), accept_foreign=True)
        last = _last[model] = key, Watches(call, step, replacement_among(call.references, KNOWN))
    return last[1]


def last_watches_of(model: nn.Module) -> Watches:
    """The last result of `watches_of`: within a call to `generate`, that from the beginning of the call."""
    last = _last.get(model)
    return watches_of(model) if last is None else last[1]


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules of a model, each once. `Module.modules` takes eight times as long, and every call needs them."""
    modules: list[nn.Module] = []
    seen: set[int] = set()
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            modules.append(module)
            waiting += reversed(module._modules.values())
    return modules


def attributes_of(module: nn.Module, *, without: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """The names in a module's `__dict__`, sorted, except those in `without` and those that every `nn.Module` has."""
    return _further(tuple(module.__dict__), without)


@lru_cache(maxsize=256)
def _further(names: tuple[str, ...], without: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted({*names} - _OF_EVERY_MODULE - without))


_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


def _may_change_during_a_call(reference: Reference) -> bool:
    """Whether this is a class attribute, a registry entry or a function of a model's file or torch.nn.functional.

    All others are compared only when a call begins: classes, torch's operators, and functions that transformers'
    helpers call.
    """
    if isinstance(reference.holder, type) or reference.registry is not None:
        return True
    home = str(reference.holder.get("__name__"))
    return home.startswith(_PER_STEP) and not isinstance(reference.value(), type)


def _references(classes: frozenset[type], settings: frozenset[tuple[str, str]]) -> Iterator[Reference]:
    yield from of_call(nn.Module)
    for cls in sorted(classes, key=lambda cls: cls.__qualname__):
        # If a class has `generate`, `loops.stepping` replaces its `__call__` during a call.
        if not hasattr(cls, "generate"):
            yield from of_call(cls)
        dependencies = of_class(cls)
        yield from dependencies.references
        for table in dependencies.registries:
            for key in _chosen(table, settings):
                yield from table.references(key, cls)
    masks = mask_registry()
    for key in _chosen(masks, settings):
        yield masks.entry(key)


def _chosen(table: Registry, settings: frozenset[tuple[str, str]]) -> list[str]:
    """The keys of this table that may be looked up with values of the model's config."""
    return sorted(table.keys() & {value for name, value in settings if table.chosen_by in name})


def mask_registry() -> Registry:
    """The functions that create masks, by attention implementation."""
    from transformers import masking_utils

    return Registry(_MASKS, getattr(masking_utils, _MASKS), ())


def masks_replaced(model: Any) -> str | None:
    """Return a sentence if a function that creates this model's masks was replaced, else None."""
    try:
        # This is 3 µs faster than the property, which is read through the config's own `__getattribute__`.
        implementation = object.__getattribute__(model.config, "_attn_implementation_internal")
    except AttributeError:
        implementation = None
    if implementation is None:
        implementation = model.config._attn_implementation
    watch = _mask_functions.get(implementation)
    if watch is None:
        watch = _mask_functions[implementation] = Watch(mask_registry().references(implementation))
    return None if watch.unchanged() else watch.difference()


def strings_of(config: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield every string among the values of a config and of its nested configs, with its name."""
    if isinstance(config, str):
        yield name, config
    elif isinstance(config, (list, tuple)):
        for value in config:
            yield from strings_of(value, name)
    else:
        inner = config if isinstance(config, dict) else getattr(config, "__dict__", {})
        for name, value in inner.items():
            yield from strings_of(value, str(name))


_mask_functions: dict[str, Watch] = {}
_last: WeakKeyDictionary[nn.Module, tuple[Hashable, Watches]] = WeakKeyDictionary()
