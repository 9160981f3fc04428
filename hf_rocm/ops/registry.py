"""The router: chooses an implementation once for each specification and records why it skipped those before it.

The predicate of an implementation returns a sentence with the reason why it refuses a specification, or None. The first
implementation that does not refuse and passes its probe is used, in the order user, aiter, triton, torch, eager. If the
user named a tier or required aiter, and that tier can't serve the call, the call raises an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from hf_rocm import options
from hf_rocm.device import Device, describe
from hf_rocm.errors import TierUnavailable
from hf_rocm.options import TIERS, Switch

SpecT = TypeVar("SpecT", bound=tuple[Any, ...])
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, eq=False)
class Implementation(Generic[SpecT]):
    """One way to compute an operation.

    refuses(spec, device): why it can't serve the call, in a sentence, or None; cheap, without side effects. call: takes
    the same arguments as the operation's other implementations. probe(spec, device): None if a small call of the same
    kind returns the right result on this device, otherwise the problem, in a sentence. Most implementations in PyTorch
    have no probe.
    """

    tier: str
    name: str
    refuses: Callable[[SpecT, Device], str | None]
    call: Callable[..., Any]
    probe: Callable[[SpecT, Device], str | None] | None = None


class Refusal(NamedTuple):
    """A candidate that was not chosen, and the reason."""

    tier: str
    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class Choice(Generic[SpecT]):
    """The implementation that serves a specification, and the reasons why the candidates before it do not."""

    spec: SpecT
    implementation: Implementation[SpecT]
    refusals: tuple[Refusal, ...]


class Case(NamedTuple):
    """A small call that checks an implementation: tensors (or None), then other positional and keyword arguments."""

    tensors: tuple[Tensor | None, ...]
    others: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = MappingProxyType({})


# Called with the operation's name and the result of a call.
Watcher = Callable[[str, Any], None]


class Route(NamedTuple):
    """The implementation that served one call, and the shapes that `Operation.recorded` selects; see `recording`."""

    operation: str
    tier: str
    name: str
    shapes: tuple[tuple[int, ...], ...]


class Table(dict[tuple[Any, ...], ValueT]):
    """Caches the results of `make`, by specification. A lookup of a known specification runs no Python code."""

    def __init__(self, make: Callable[[tuple[Any, ...]], ValueT]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, spec: tuple[Any, ...]) -> ValueT:
        value = self[spec] = self.make(spec)
        return value


@dataclass(eq=False)
class Operation(Generic[SpecT]):
    """One operation: its implementations in order of preference, and the choices made so far.

    cases(spec): the calls that check an implementation before its first use. kind(spec): the representative of all
    specifications that differ only in fields that can't affect the correctness of a kernel; one check is valid for all
    of them. family: the operation whose options apply; its own name unless it is a variant of another operation.
    terms: the NamedTuple that implementations take, if they take one instead of the arguments themselves. recorded: the
    positions of the arguments, or of the fields in terms, whose shapes `recording` collects.

    choices, calls: the choice for a specification, and the function that serves it. The key may be a plain tuple of the
    fields, which is faster: creating the NamedTuple with keywords takes longer than the rest of the routing.
    """

    name: str
    spec_type: type[SpecT]
    cases: Callable[[SpecT], Iterator[Case]]
    kind: Callable[[SpecT], SpecT] = lambda spec: spec
    family: str = ""
    terms: type[tuple[Any, ...]] | None = None
    recorded: tuple[int, ...] = (0, 1)
    implementations: list[Implementation[SpecT]] = field(default_factory=list)
    choices: Table[Choice[SpecT]] = field(init=False)
    calls: Table[Callable[..., Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.family = self.family or self.name
        self.choices = Table(lambda spec: self._choose(self.spec_type(*spec)))
        self.calls = Table(self._call)
        _operations[self.name] = self

    def register(self, implementation: Implementation[SpecT]) -> None:
        """Add an implementation at the end of its tier. Earlier choices are dropped."""
        self.implementations.append(implementation)
        self.implementations.sort(key=lambda candidate: TIERS.index(candidate.tier))
        self.forget()

    def choose(self, spec: tuple[Any, ...]) -> Choice[SpecT]:
        """The choice for a specification, or for the plain tuple of its fields."""
        return self.choices[spec]

    def keep(self, choice: Choice[SpecT]) -> None:
        """Use this choice for its specification until choices are dropped."""
        self.choices[choice.spec] = choice
        self.calls.pop(choice.spec, None)

    def forget(self) -> None:
        """Drop the choices made so far."""
        self.choices.clear()
        self.calls.clear()

    def traced(self, spec: tuple[Any, ...]) -> Callable[..., Any]:
        """The function that serves a call while torch.compile or torch.export traces."""
        return self.implementations[_index_of_choice(self.name, _specialised(spec))].call

    def _call(self, spec: tuple[Any, ...]) -> Callable[..., Any]:
        implementation = self.choices[spec].implementation
        return _recorded(self, implementation) if _recorders else implementation.call

    def _choose(self, spec: SpecT) -> Choice[SpecT]:
        device = describe(spec.device)  # type: ignore[attr-defined]
        current = options.current()
        named = current.tier(self.family)
        switch = current.aiter[self.family]
        refusals: list[Refusal] = []
        for candidate in self.implementations:
            reason = None
            if candidate.tier == "aiter" and named is None and switch is Switch.OFF:
                reason = "switched off by an environment variable"
            elif named is not None and candidate.tier != named:
                reason = f"the {named} tier was requested"
            else:
                reason = candidate.refuses(spec, device)
                if reason is None and candidate.probe is not None and current.probe:
                    reason = candidate.probe(spec, device)
            if reason is None:
                if switch is Switch.REQUIRED and named is None and candidate.tier != "aiter":
                    break
                return Choice(spec, candidate, tuple(refusals))
            refusals.append(Refusal(candidate.tier, candidate.name, reason))
        required = named or "aiter"
        if not any(candidate.tier == required for candidate in self.implementations):
            refusals.insert(
                0, Refusal(required, "none", f"this release has no {required} implementation of {self.name}")
            )
        raise TierUnavailable(
            f"{self.name} must run in the {required} tier, which can't serve this call",
            facts={
                "call": _describe(spec),
                **{
                    f"{refusal.tier}/{refusal.name}": refusal.reason for refusal in refusals if refusal.tier == required
                },
            },
            hint="unset HF_ROCM_TIER and the USE_AITER_… variable of this operation, or request another tier",
        )


def kernel_serves(operation: Operation[Any], spec: tuple[Any, ...]) -> bool:
    """Whether an implementation of the user, aiter or triton tier serves this specification."""
    try:
        return operation.choose(spec).implementation.tier not in ("torch", "eager")
    except TierUnavailable:
        # The named tier can't serve it: a call of the operation raises an error with the reasons.
        return False


def serving(operation: Operation[Any], spec: tuple[Any, ...], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """The function that serves a call, or `otherwise` if the user named or required a tier that can't serve it.

    Used for variants of another operation: the options of that operation apply to a variant, but the tier that the user
    chose for the operation may have no implementation of the variant.
    """
    try:
        return operation.calls[spec]
    except TierUnavailable:
        return otherwise


def chosen_elsewhere(names: Iterable[str]) -> str | None:
    """Why a Triton kernel must not replace these operations, or None. The user may have chosen their tier or kernel."""
    for name in names:
        named = options.current().tier(name)
        if named not in (None, "triton"):
            return f"the {named} tier was requested for {name}"
        if named is None and any(candidate.tier == "user" for candidate in operations()[name].implementations):
            return f"{name} has an implementation that the user registered"
    return None


def refuses_nothing(spec: object, device: Device) -> None:
    """The predicate of an implementation that serves every call."""


def device_of(tensor: Tensor) -> Device:
    """The device of a tensor, as predicates take it."""
    return describe(tensor.device)


_operations: dict[str, Operation[Any]] = {}
# The routes that are collected, and the thread whose calls are collected, or None for all threads. Every change creates
# a new tuple, under the lock.
_recorders: tuple[tuple[list[Route], int | None], ...] = ()
_recorders_lock = threading.Lock()
_watchers: list[Watcher] = []


def operations() -> dict[str, Operation[Any]]:
    """Every operation by name."""
    return dict(_operations)


def forget_choices() -> None:
    """Drop every choice, after a change of options."""
    for operation in _operations.values():
        operation.forget()


@contextmanager
def recording(*, this_thread: bool = False) -> Iterator[list[Route]]:
    """Within the block, collect the route of every call into a list of `Route`. Compiled code is not recorded.

    this_thread: leave out the calls of other threads.
    """
    global _recorders
    recorder: tuple[list[Route], int | None] = [], threading.get_ident() if this_thread else None
    with _recorders_lock:
        _recorders = (*_recorders, recorder)
        _drop_calls()
    try:
        yield recorder[0]
    finally:
        with _recorders_lock:
            _recorders = tuple(other for other in _recorders if other is not recorder)
            _drop_calls()


@contextmanager
def watching(watcher: Watcher) -> Iterator[list[Route]]:
    """Like `recording`, but also call `watcher` with the operation's name and the result of every call in the block."""
    _watchers.append(watcher)
    try:
        with recording() as routes:
            yield routes
    finally:
        _watchers.remove(watcher)


def _drop_calls() -> None:
    """Drop the functions, because recording has begun or ended. The choices are kept."""
    for operation in _operations.values():
        operation.calls.clear()


def _recorded(operation: Operation[Any], implementation: Implementation[Any]) -> Callable[..., Any]:
    """Wrap the implementation's function: record each call, and pass its result to the watchers."""

    def recorded(*args: Any, **kwargs: Any) -> Any:
        tensors = args if operation.terms is None else args[0]
        shapes = tuple(tuple(tensors[position].shape) for position in operation.recorded)
        for routes, thread in _recorders:
            if thread is None or thread == threading.get_ident():
                routes.append(Route(operation.name, implementation.tier, implementation.name, shapes))
        result = implementation.call(*args, **kwargs)
        for watcher in _watchers:
            watcher(operation.name, result)
        return result

    return recorded


def _specialised(spec: tuple[Any, ...]) -> tuple[Any, ...]:
    """Specialise symbolic sizes and bools to constants, with guards, because the choice depends on them."""
    # branching on a symbolic bool turns it into a constant
    values = [(True if value else False) if isinstance(value, bool) else value for value in spec]  # noqa: SIM210
    return tuple(int(value) if isinstance(value, int) and not isinstance(value, bool) else value for value in values)


def _index_of_choice(operation: str, spec: tuple[Any, ...]) -> int:
    """The index of the choice, as a constant of the trace: options and probes are not part of the graph."""
    traced = _operations[operation]
    return traced.implementations.index(traced.choose(spec).implementation)


# the same as torch.compiler.assume_constant_result, without importing the compiler, which takes seconds
_index_of_choice._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _describe(spec: tuple[Any, ...]) -> str:
    fields = getattr(spec, "_fields", ())
    return ", ".join(f"{name}={value}" for name, value in zip(fields, spec, strict=False))
