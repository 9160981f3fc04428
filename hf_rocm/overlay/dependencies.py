"""The dependencies of a function of transformers: functions called through namespaces, classes and registries.

They are derived from the function's bytecode. A kernel that serves a class skips the calls of the stock forward:
functions of the model's file and of torch, methods of the class, and entries of a registry. If one of them was replaced
(see `replacements`), the stock forward has to run, because it calls the replacement.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MappingProxyType, MethodDescriptorType, ModuleType
from typing import Any, NamedTuple

from hf_rocm import patches
from hf_rocm.patches import ABSENT

# Packages whose functions count as stock.
OWN = frozenset(("transformers", "torch", "kernels", "hf_rocm"))

# The function in transformers' model files that is called for `eager`, and by default if a registry is not used.
_EAGER = "eager_attention_forward"


class Reference(NamedTuple):
    """The place where a function is looked up: an entry of a namespace or registry, or an attribute of a class."""

    holder: Any
    name: str
    # The registry's name.
    registry: str | None = None

    def value(self) -> Any:
        if is_mapping(self.holder):
            return self.holder.get(self.name, ABSENT)
        # A local entry takes precedence over a global one.
        if self.registry is not None:
            return self.holder._local_mapping.get(self.name, self.holder._global_mapping.get(self.name, ABSENT))
        return getattr(self.holder, self.name, ABSENT)

    def original(self) -> Any:
        """The value without hf_rocm's changes."""
        if self.registry is not None and not is_mapping(self.holder):
            places = (self.holder._local_mapping, self.holder._global_mapping)
            values = (patches.original(place, self.name) for place in places)
            return next((value for value in values if value is not ABSENT), ABSENT)
        owners = self.holder.__mro__ if isinstance(self.holder, type) else (self.holder,)
        values = (patches.original(owner, self.name) for owner in owners)
        value = next((value for value in values if value is not ABSENT), ABSENT)
        return self.value() if value is ABSENT else value

    def __str__(self) -> str:
        if self.registry is not None:
            return f"{self.name!r} of {self.registry}"
        if isinstance(self.holder, type):
            return f"{self.holder.__name__}.{self.name}"
        home = str(self.holder.get("__name__", "a class"))
        return f"{self.name} of {home.rpartition('.')[2] if home.startswith('transformers.models.') else home}"


class Registry(NamedTuple):
    """A mapping in transformers whose entries are selected by a value of the config."""

    name: str
    mapping: Any
    # The references that are called if the registry is not used or has no such entry.
    default: tuple[Reference, ...]

    def keys(self) -> set[str]:
        """The existing keys and, for an interface with `get_interface`, `eager`, which may be added."""
        return {*self.mapping, "eager"} if hasattr(self.mapping, "get_interface") else set(self.mapping)

    @property
    def chosen_by(self) -> str:
        """A substring of the names of the config attributes that select an entry; empty if any attribute may do so."""
        kind = type(self.mapping).__name__
        return "attn_implementation" if "Attention" in kind else "experts_implementation" if "Experts" in kind else ""

    def entry(self, key: str) -> Reference:
        return Reference(self.mapping, key, self.name)

    def references(self, key: str, cls: type | None = None) -> tuple[Reference, ...]:
        """The dependencies of a call with this key: the entry, and the references of its function.

        cls: the class of the module that the function receives, whose methods it may call.
        """
        # Without `get_interface`, as in transformers 5.0, `eager` is not looked up.
        if key not in self.keys():
            return self.default
        place = self.entry(key)
        function = place.original()
        return (place, *(self.default if function is ABSENT else of_function(function, cls).references))


class Dependencies(NamedTuple):
    """The references of a function. methods: names that it reads from its class and that an instance may override."""

    references: tuple[Reference, ...]
    registries: tuple[Registry, ...]
    methods: frozenset[str]


def of_class(cls: type) -> Dependencies:
    """The dependencies of a class's forward without hf_rocm's changes; the first reference is the forward itself."""
    own = Reference(cls, "forward")
    forward = own.original()
    derived = of_function(forward, cls)
    return derived._replace(references=(own, *derived.references))


def of_call(cls: type) -> tuple[Reference, ...]:
    """The methods of `nn.Module` that a call of an instance runs before its forward. A class may override them."""
    return Reference(cls, "__call__"), Reference(cls, "_call_impl")


def of_function(function: Any, cls: type | None = None) -> Dependencies:
    """The references of a function and of the functions of the same file that it calls.

    cls: the class of `self`, or of the module that the function receives.
    """
    references: dict[tuple[int, str], Reference] = {}
    registries: dict[int, Registry] = {}
    methods: set[str] = set()
    seen: set[int] = set()
    waiting = [function]
    eager: tuple[Reference, ...] = ()
    while waiting:
        current = waiting.pop()
        if not isinstance(current, FunctionType) or id(current) in seen:
            continue
        seen.add(id(current))
        namespace = current.__globals__
        for name, value in _enclosed(current):
            if is_registry(value):
                registries[id(value)] = Registry(name, value, ())
            else:
                waiting.append(value)
        if hasattr(current, "__wrapped__"):
            waiting.append(current.__wrapped__)
            if str(namespace.get("__name__")).startswith("transformers.utils."):
                # These decorators warn of deprecations, check arguments or collect outputs.
                continue
        for code in _codes(current.__code__):
            for chain in _chains(code):
                reference = _resolved(namespace, chain)
                if reference is None:
                    continue
                value = reference.value()
                if is_registry(value):
                    registries[id(value)] = Registry(reference.name, value, ())
                if reference.name == _EAGER and function is not value:
                    eager = (reference, *of_function(value).references)
                elif (callable(value) or is_registry(value)) and not _is_torch_class(value):
                    references[id(reference.holder), reference.name] = reference
                    if getattr(inspect.unwrap(value), "__globals__", None) is namespace:
                        waiting.append(value)
            for name in code.co_names:
                method = None if cls is None else _method(cls, name)
                if method is not None:
                    methods.add(name)
                    references[id(method.holder), name] = method
                    value = inspect.getattr_static(cls, name)
                    waiting.append(getattr(value, "fget", None) or getattr(value, "__func__", value))
    with_default = tuple(registry._replace(default=eager) for registry in registries.values())
    return Dependencies(tuple(references.values()), with_default, frozenset(methods))


def of_method(cls: type, name: str, *, called: type) -> Iterator[Reference]:
    """Yield the reference to a method of a class, and the references of its function without hf_rocm's changes.

    called: a class, such as `Tensor`. References to its methods whose names occur in the function's code are also
    yielded.
    """
    own = Reference(cls, name)
    yield own
    function = own.original()
    if isinstance(function, FunctionType):
        yield from of_function(function).references
        for code in _codes(function.__code__):
            methods = (name for name in code.co_names if isinstance(getattr(called, name, None), _METHODS))
            yield from (Reference(called, name) for name in methods)


_METHODS = (FunctionType, MethodDescriptorType)


def is_mapping(holder: Any) -> bool:
    return isinstance(holder, (dict, MappingProxyType))


def is_registry(value: Any) -> bool:
    """Whether a value is one of transformers' interfaces or a model file's own table of functions."""
    if isinstance(value, dict):
        return bool(value) and all(isinstance(entry, FunctionType) for entry in value.values())
    return isinstance(getattr(value, "_global_mapping", None), dict) and hasattr(value, "_local_mapping")


def _is_torch_class(value: Any) -> bool:
    """Whether a value is a class of torch (Tensor, finfo, no_grad), which files use but which is never replaced."""
    return isinstance(value, type) and value.__module__.partition(".")[0] == "torch"


def _enclosed(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The functions and registries in a closure, for example a decorator's."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:
            # The variable has not been assigned yet.
            continue
        if isinstance(value, FunctionType) or is_registry(value):
            yield name, value


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and the code of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _chains(code: CodeType) -> Iterator[list[str]]:
    """The global names that code reads, with the attributes that follow: ["nn", "functional", "silu"]."""
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            if chain:
                yield chain
            chain = [instruction.argval]
        elif chain and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain.append(instruction.argval)
        elif instruction.opname not in ("EXTENDED_ARG", "CACHE"):
            if chain:
                yield chain
            chain = []


def _resolved(namespace: dict[str, Any], chain: list[str]) -> Reference | None:
    """Resolve a chain through modules of the packages in `OWN`. None for modules, other packages and builtins."""
    holder, name = namespace, chain[0]
    if name not in namespace:
        return None
    for attribute in chain[1:]:
        module = holder[name]
        if not isinstance(module, ModuleType):
            break
        if module.__name__.partition(".")[0] not in OWN or attribute not in vars(module):
            return None
        holder, name = vars(module), attribute
    return None if isinstance(holder[name], ModuleType) else Reference(holder, name)


def _method(cls: type, name: str) -> Reference | None:
    """The reference to a method or property that the class or a base below `nn.Module` defines, or None.

    Also None for `forward`.
    """
    if name == "forward":
        return None
    for parent in cls.__mro__:
        if parent is object or parent.__module__ == "torch.nn.modules.module":
            return None
        value: Mapping[str, Any] | Any = vars(parent).get(name)
        if isinstance(value, classmethod):
            return Reference(vars(parent), name)
        if isinstance(value, (FunctionType, property, staticmethod)):
            return Reference(cls, name)
    return None
