"""Detect replaced dependencies of a function by their identity and by their package."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType
from typing import Any, TypeVar

from hf_rocm.overlay.dependencies import OWN, Reference, is_mapping, is_registry, of_call, of_class, of_function
from hf_rocm.patches import ABSENT

Function = TypeVar("Function", bound=Callable[..., object])

_CACHED = type(lru_cache(lambda: None))

# The expected value of a reference that was already replaced; no value is identical to it.
_UNKNOWN: Any = object()


class Watch:
    """References and their expected values. `unchanged()` compares them all, at about 20 ns per reference.

    accept_foreign: accept values of other packages as expected. Otherwise the watch reports a difference until a value
    of a package in `OWN` is present. `difference` and `holds` ignore hf_rocm's own changes; `unchanged()` returns False
    after such a change until `difference` or `holds` has been called.
    """

    def __init__(self, references: Iterable[Reference], *, accept_foreign: bool = False) -> None:
        self.references = tuple({(id(item.holder), item.name): item for item in references}.values())
        self.expected = [reference.original() for reference in self.references]
        if not accept_foreign:
            pairs = zip(self.references, self.expected, strict=True)
            self.expected = [_UNKNOWN if _is_foreign(*pair) else pair[1] for pair in pairs]
        self._compile()

    def difference(self) -> str | None:
        """Return a sentence about the first reference whose value was replaced, or None."""
        for index, reference in enumerate(self.references):
            value = reference.original()
            if value is self.expected[index]:
                continue
            if self.expected[index] is not _UNKNOWN or _is_foreign(reference, value):
                return _sentence(reference, value)
            # The initial replacement was removed.
            self.expected[index] = value
        if not self.unchanged():
            # One of hf_rocm's changes was applied or undone.
            self._compile()
        return None

    def holds(self) -> bool:
        """Like `unchanged`, but ignores hf_rocm's changes and the removal of initial replacements."""
        return self.unchanged() or self.difference() is None

    def _compile(self) -> None:
        current = [reference.value() for reference in self.references]
        known = [value is not _UNKNOWN for value in self.expected]
        expected = [value if is_known else _UNKNOWN for value, is_known in zip(current, known, strict=True)]
        self.unchanged = _compiled(self.references, expected)


def constant_in_traces(function: Function) -> Function:
    """Make torch.compile call a function while it traces and treat the result as a constant of the compiled code."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_traces
def unchanged(code: Any) -> bool:
    """Whether the dependencies of a function, or of a call to a class's instances, are the same as at the first check.

    hf_rocm's changes are ignored. False while a replacement that existed at the first check is present, and for a
    class of a package that is not in `OWN`.
    """
    watch = watches.get(code)
    if watch is None:
        if not isinstance(code, type):
            references = of_function(code).references
        elif code.__module__.partition(".")[0] in OWN:
            references = (*of_class(code).references, *of_call(code))
        else:
            return False
        watch = watches[code] = Watch(references)
    return watch.unchanged() or watch.holds()


def replacement_among(references: Iterable[Reference], known: frozenset[str] = OWN) -> str | None:
    """Describe the first reference to a function that is neither stock nor hf_rocm's; return None if there is none.

    known: packages whose functions are not reported. If hf_rocm replaced a value, the original is examined.
    """
    for reference in references:
        value = reference.original()
        if _is_foreign(reference, value) and origin(value).partition(".")[0] not in known:
            return _sentence(reference, value)
    return None


def origin(value: Any) -> str:
    """Return the name of the module that defines a function or a class, or of the module of another value's class.

    For functions, `__module__` is not used, because functools.wraps copies it from the wrapped function.
    """
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__", ""))
    if isinstance(value, MethodType):
        return origin(value.__func__)
    if isinstance(value, (staticmethod, classmethod)):
        return origin(value.__func__)
    if isinstance(value, property):
        return origin(value.fget)
    if isinstance(value, partial):
        return origin(value.func)
    if isinstance(value, _CACHED):
        return origin(value.__wrapped__)
    if isinstance(value, BuiltinFunctionType):
        return value.__module__ or "torch"
    if isinstance(value, MethodDescriptorType):
        return value.__objclass__.__module__
    return str((value if isinstance(value, type) else type(value)).__module__)


def _is_foreign(reference: Reference, value: Any) -> bool:
    if value is ABSENT:
        return reference.registry is None
    holder = reference.holder
    if is_registry(value) or (isinstance(holder, type) and _is_defined_by_foreign_class(holder, reference.name, value)):
        return False
    home = origin(value)
    package = home.partition(".")[0]
    if home == "builtins" and not callable(value):
        # This is a flag, such as `Cache.is_compileable` in 4.x.
        return False
    if package not in OWN:
        is_definition = isinstance(value, (FunctionType, BuiltinFunctionType, type))
        # Functions and classes of the standard library, for example functools.partial, are not foreign.
        return not (is_definition and package in sys.stdlib_module_names)
    if not isinstance(value, FunctionType) or not isinstance(holder, dict):
        return False
    # a function of another model, unless the file imports it
    module = str(holder.get("__name__", home))
    models = "transformers.models."
    return (
        home.startswith(models)
        and module.startswith(models)
        and home != module
        and not _imports(module, reference.name)
    )


def _is_defined_by_foreign_class(cls: type, name: str, value: Any) -> bool:
    """Whether a method is defined by a class of another package, and is therefore not a replacement."""
    if cls.__module__.partition(".")[0] in OWN:
        return False
    qualified = getattr(value, "__qualname__", None)
    return any(qualified == f"{parent.__qualname__}.{name}" for parent in cls.__mro__ if name in vars(parent))


def _imports(module: str, name: str) -> bool:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, KeyError):
        return False
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return any((alias.asname or alias.name) == name for node in imports for alias in node.names)


def _sentence(reference: Reference, value: Any) -> str:
    if value is ABSENT:
        return f"{reference} was removed"
    home = origin(value)
    return f"{reference} was set to {value!r}" if home == "builtins" else f"{reference} was replaced by {home}"


def _compiled(references: tuple[Reference, ...], expected: list[Any]) -> Callable[[], bool]:
    """Compile all comparisons into one function, because a loop would take three times as long.

    Values are compared by identity, because a wrapper may be equal to the value that it wraps.
    """
    space: dict[str, Any] = {}
    terms = []
    for number, (reference, value) in enumerate(zip(references, expected, strict=True)):
        holder, name = reference.holder, reference.name
        if value is _UNKNOWN or (value is ABSENT and reference.registry is None):
            terms.append("False")
            continue
        place = f"holder_{number}"
        # A local entry takes precedence.
        if reference.registry is not None and not is_mapping(holder):
            if name not in holder._local_mapping:
                space[f"local_{number}"] = holder._local_mapping
                terms.append(f"{name!r} not in local_{number}")
            holder = holder._global_mapping if name not in holder._local_mapping else holder._local_mapping
        space[place], space[f"value_{number}"] = holder, value
        if value is ABSENT:
            terms.append(f"{name!r} not in {place}")
        else:
            current = f"{place}[{name!r}]" if is_mapping(holder) else f"{place}.{name}"
            terms.append(f"{current} is value_{number}")
    condition = " and ".join(terms) or "True"
    exec(f"def check():\n try: return {condition}\n except (KeyError, AttributeError): return False", space)
    return constant_in_traces(space["check"])


# Watches by class or function. The keys, most of which belong to transformers or torch, are never garbage-collected.
watches: dict[Any, Watch] = {}
