"""The router: one choice of implementation per specification, made once and kept, with every refusal recorded.

An implementation says in a sentence why it refuses a specification, or None. The first that doesn't refuse is
used: aiter, triton, torch, eager, in that order. A tier that the user named must serve or the call raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.compiler import is_compiling

from hf_rocm import options
from hf_rocm.device import Device, describe
from hf_rocm.errors import TierUnavailable
from hf_rocm.options import TIERS, Switch

SpecT = TypeVar("SpecT", bound=tuple[Any, ...])


@dataclass(frozen=True, eq=False)
class Implementation(Generic[SpecT]):
    """One way to compute an operation.

    refuses(spec, device): why not, in a sentence, or None; cheap, without side effects. call: same arguments as the
    operation's other implementations. probe(spec, device): None if a tiny case of the same kind came out right on
    this device, else the sentence; None for plain PyTorch, which needs no probe.
    """

    tier: str
    name: str
    refuses: Callable[[SpecT, Device], str | None]
    call: Callable[..., Any]
    probe: Callable[[SpecT, Device], str | None] | None = None


class Refusal(NamedTuple):
    """A candidate that was passed over, and why."""

    tier: str
    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class Choice(Generic[SpecT]):
    """What serves a specification, and every faster candidate with the reason why it doesn't."""

    spec: SpecT
    implementation: Implementation[SpecT]
    refusals: tuple[Refusal, ...]


# Is told the operation's name and what a call of it returned.
Watcher = Callable[[str, Any], None]


class Route(NamedTuple):
    """One call as it was routed, with the shapes of its tensors: what `recording` collects."""

    operation: str
    tier: str
    name: str
    shapes: tuple[tuple[int, ...], ...]


@dataclass(eq=False)
class Operation(Generic[SpecT]):
    """One operation: its implementations in order of preference, and the choices made so far."""

    name: str
    spec_type: type[SpecT]
    family: str = ""  # whose options it follows; its own unless it is a form of another operation
    implementations: list[Implementation[SpecT]] = field(default_factory=list)
    choices: dict[tuple[Any, ...], Choice[SpecT]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.family = self.family or self.name
        _operations[self.name] = self

    def register(self, implementation: Implementation[SpecT]) -> None:
        """Add an implementation at the end of its tier. Choices made before are forgotten."""
        self.implementations.append(implementation)
        self.implementations.sort(key=lambda each: TIERS.index(each.tier))
        self.choices.clear()

    def choose(self, key: tuple[Any, ...]) -> Choice[SpecT]:
        """The choice for a specification given as the plain tuple of its fields."""
        choice = self.choices.get(key)
        if choice is None:
            choice = self.choices[key] = self._choose(self.spec_type(*key))
        return choice

    def _choose(self, spec: SpecT) -> Choice[SpecT]:
        device = describe(spec.device)  # type: ignore[attr-defined]
        current = options.current()
        named = current.tier(self.family)
        switch = current.aiter[self.family]
        refusals: list[Refusal] = []
        for each in self.implementations:
            reason = None
            if each.tier == "aiter" and named is None and switch is Switch.OFF:
                reason = "switched off by an environment variable"
            elif named is not None and each.tier != named:
                reason = f"the {named} tier was named"
            else:
                reason = each.refuses(spec, device)
                if reason is None and each.probe is not None and current.probe:
                    reason = each.probe(spec, device)
            if reason is None:
                if switch is Switch.REQUIRED and named is None and each.tier != "aiter":
                    break
                return Choice(spec, each, tuple(refusals))
            refusals.append(Refusal(each.tier, each.name, reason))
        wanted = named or "aiter"
        if not any(each.tier == wanted for each in self.implementations):
            refusals.insert(0, Refusal(wanted, "none", f"this release has no {wanted} implementation of {self.name}"))
        raise TierUnavailable(
            f"{self.name} was to run in the {wanted} tier, which can't serve this call",
            facts={
                "call": _describe(spec),
                **{f"{each.tier}/{each.name}": each.reason for each in refusals if each.tier == wanted},
            },
            hint="unset HF_ROCM_TIER and the USE_AITER_… variable of this operation, or name another tier",
        )


def kernel_serves(operation: Operation[Any], key: tuple[Any, ...]) -> bool:
    """Whether something faster than plain PyTorch serves this specification."""
    try:
        return operation.choose(key).implementation.tier not in ("torch", "eager")
    except TierUnavailable:  # a tier was named that can't: whoever calls the operation is told so, in its own words
        return False


def refuses_nothing(spec: object, device: Device) -> None:
    """The predicate of an implementation that serves every call."""


def device_of(tensor: torch.Tensor) -> Device:
    """The device of a tensor as the predicates see it."""
    return describe(tensor.device)


_operations: dict[str, Operation[Any]] = {}
_recorders: list[list[Route]] = []
_watchers: list[Watcher] = []


def operations() -> dict[str, Operation[Any]]:
    """Every operation by name."""
    return dict(_operations)


def forget_choices() -> None:
    """Choose anew from here on: options changed."""
    for operation in _operations.values():
        operation.choices.clear()


@contextmanager
def recording() -> Iterator[list[Route]]:
    """Collect the route of every call made within the block (eager calls only; compiled code isn't seen)."""
    routes: list[Route] = []
    _recorders.append(routes)
    try:
        yield routes
    finally:
        _recorders.remove(routes)


@contextmanager
def watching(watcher: Watcher) -> Iterator[list[Route]]:
    """`recording`, where watcher is also shown the result of every call made within the block."""
    _watchers.append(watcher)
    try:
        with recording() as routes:
            yield routes
    finally:
        _watchers.remove(watcher)


def route(operation: Operation[SpecT], key: tuple[Any, ...], *tensors: torch.Tensor) -> Callable[..., Any]:
    """The function that serves this call; 1 µs once the choice was made."""
    if is_compiling():
        return operation.implementations[_place_of_choice(operation.name, _specialised(key))].call
    choice = operation.choices.get(key)
    if choice is None:
        choice = operation.choose(key)
    if _recorders:
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        for recorder in _recorders:
            recorder.append(Route(operation.name, choice.implementation.tier, choice.implementation.name, shapes))
        if _watchers:
            return _watched(operation.name, choice.implementation.call)
    return choice.implementation.call


def _watched(operation: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        for watcher in _watchers:
            watcher(operation, result)
        return result

    return watched


def _specialised(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sizes that the compiler keeps symbolic become numbers, with a guard: the choice depends on them."""
    # branching on a symbolic truth value is what turns it into a constant
    truths = [(True if each else False) if isinstance(each, bool) else each for each in key]  # noqa: SIM210
    return tuple(int(each) if isinstance(each, int) and not isinstance(each, bool) else each for each in truths)


def _place_of_choice(operation: str, key: tuple[Any, ...]) -> int:
    """Chosen while tracing, as if it were a constant: options and probes are no part of the graph."""
    named = _operations[operation]
    return named.implementations.index(named.choose(key).implementation)


# what torch.compiler.assume_constant_result does, without the compiler's import, which takes seconds
_place_of_choice._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _describe(spec: tuple[Any, ...]) -> str:
    fields = getattr(spec, "_fields", ())
    return ", ".join(f"{name}={value}" for name, value in zip(fields, spec, strict=False))
