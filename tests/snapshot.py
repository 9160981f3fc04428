"""A snapshot of all entries of every module of transformers, torch and accelerate, compared by identity.

The snapshot does not use hf_rocm's own list of changes. Namespaces are modules, their classes, objects in modules
(registries, function tables), and nested dictionaries and lists.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

ROOTS = ("transformers", "torch", "accelerate")
ABSENT = object()
CACHES = ("torch._dynamo", "torch._guards", "torch.fx", "torch._higher_order_ops", "torch._opaque_base")
# Maximum nesting of containers and objects in an entry of a module or class.
_DEPTH = 3

# Attributes that Python itself sets or replaces, such as the caches of `abc` and `warnings`.
_WRITTEN_BY_PYTHON = {"__warningregistry__", "__abstractmethods__", "_abc_impl", "__weakref__", "__annotations__"}

Snapshot = dict[tuple[str, ...], tuple[Any, dict[Any, Any]]]


def take() -> Snapshot:
    """Returns path → (owner, entries) for all namespaces.

    The references keep all objects alive, so identities are unique.
    """
    snapshot: Snapshot = {}
    seen: set[int] = set()
    waiting: list[tuple[tuple[str, ...], Any, int]] = [
        ((name,), module, 0)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ROOTS and _is(module, types.ModuleType)
    ]
    while waiting:
        path, owner, depth = waiting.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        entries = _entries(owner)
        snapshot[path] = owner, entries
        for name, value in entries.items():
            inner = depth if _is(value, type) else depth + 1
            if inner <= _DEPTH and _is_namespace(value):
                waiting.append(((*path, str(name)), value, inner))
    return snapshot


def differences(before: Snapshot, *, ignored: tuple[str, ...] = CACHES) -> dict[str, tuple[Any, Any]]:
    """Returns entries that were replaced or removed, or are new and refer to hf_rocm: "path.name" → (before, now).

    New entries count only if they refer to hf_rocm, because transformers and torch import modules, register classes and
    cache results at run time. A plain value, such as a number or a string, that was removed or replaced by another one
    does not count. ignored: prefixes of modules whose caches PyTorch replaces; their entries count only if they refer
    to hf_rocm.
    """
    changed = {}
    for path, (owner, entries) in before.items():
        cache = path[0].startswith(ignored)
        current = _entries(owner)
        for name in entries if entries.keys() == current.keys() else {**entries, **current}:
            old, new = entries.get(name, ABSENT), current.get(name, ABSENT)
            if old is new:
                continue
            if _is(new, types.ModuleType) and str(name).startswith("__import_"):
                # The compiler adds modules under these names to the globals of compiled code.
                continue
            if ((cache or old is ABSENT) and not is_hf_rocm(new)) or (_is_plain(old) and _is_plain(new)):
                continue
            changed[".".join((*path, str(name)))] = old, new
    return changed


def references() -> Iterator[str]:
    """Yields the paths of all entries that refer to hf_rocm's code."""
    for path, (_, entries) in take().items():
        for name, value in entries.items():
            if is_hf_rocm(value):
                yield ".".join((*path, str(name)))


def is_hf_rocm(value: Any, depth: int = 4) -> bool:
    """Whether a value is a function, class, module or object of hf_rocm or of an overlay activated in memory, or wraps,
    binds or closes over such a function."""
    if depth == 0:
        return False
    if _is(value, types.FunctionType):
        return str(value.__globals__.get("__name__", "")).partition(".")[0] == "hf_rocm" or any(
            is_hf_rocm(content, depth - 1) for content in map(_content, value.__closure__ or ())
        )
    if _is(value, staticmethod, classmethod, types.MethodType):
        return is_hf_rocm(value.__func__, depth - 1)
    if _is(value, functools.partial):
        return is_hf_rocm(value.func, depth - 1) or any(is_hf_rocm(argument, depth - 1) for argument in value.args)
    if _is(value, property):
        return any(is_hf_rocm(accessor, depth - 1) for accessor in (value.fget, value.fset, value.fdel))
    if _is(value, types.ModuleType):
        return value.__name__.partition(".")[0] == "hf_rocm"
    origin = value.__module__ if _is(value, type) else type(value).__module__
    return str(origin).partition(".")[0] == "hf_rocm"


def _is(value: Any, *kinds: type) -> bool:
    """Check the type itself, because `isinstance` reads `__class__`, which warns in torch."""
    return issubclass(type(value), kinds)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _entries(owner: Any) -> dict[Any, Any]:
    if _is(owner, list):
        return dict(enumerate(owner))
    if _is(owner, type):
        attributes: Any = vars(owner)
    else:
        attributes = object.__getattribute__(owner, "__dict__") if _has_attributes(owner) else {}
    entries = {name: value for name, value in list(attributes.items()) if name not in _WRITTEN_BY_PYTHON}
    if _is(owner, dict):
        # `dict.items` avoids the methods of lazy mappings, which import modules
        entries.update((f"[{key!r}]", value) for key, value in list(dict.items(owner)))
    return entries


def _has_attributes(value: Any) -> bool:
    kinds = (types.GetSetDescriptorType, types.MemberDescriptorType)
    return any(isinstance(vars(cls).get("__dict__"), kinds) for cls in type(value).__mro__)


def _is_namespace(value: Any) -> bool:
    if _is(value, types.ModuleType):
        # Modules are reached through sys.modules.
        return False
    if _is(value, dict, list):
        return True
    if _is(value, type):
        return str(value.__module__).partition(".")[0] in ROOTS
    return str(type(value).__module__).partition(".")[0] in ROOTS and _has_attributes(value)


def _is_plain(value: Any) -> bool:
    return value is ABSENT or value is None or _is(value, bool, int, float, str, bytes)
