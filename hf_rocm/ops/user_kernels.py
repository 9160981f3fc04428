"""Implementations that the user registers. They are checked and reported like built-in ones, and take precedence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_rocm.device import Device
from hf_rocm.errors import OptionError
from hf_rocm.ops.probe import checked_here
from hf_rocm.ops.registry import Implementation, forget_choices, operations

TIER = "user"


def register(
    operation: str,
    *,
    name: str,
    call: Callable[..., Any],
    refuses: Callable[[Any, Device], str | None],
    check: bool = True,
) -> Callable[[], None]:
    """Register another implementation of an operation.

    operation: `attention`, `linear`, … name: the implementation's name in `explain`. call: takes the arguments of the
    operation's eager implementation (the fields, if it takes a NamedTuple) and returns the same result. refuses(spec,
    device): why the implementation can't serve a specification, in a sentence, or None; called whenever an
    implementation is selected, so it must be cheap and without side effects. check: whether to compare the
    implementation with the eager tier before its first use, in this process.

    The implementation is preferred to every built-in one; `HF_ROCM_TIER=user` requires it. Returns a function that
    removes it. Raises `OptionError` if the operation is unknown or the name is already used.
    """
    available = operations()
    if operation not in available:
        raise OptionError(f"there is no operation {operation!r}", facts={"operations": ", ".join(sorted(available))})
    target = available[operation]
    if any((known.tier, known.name) == (TIER, name) for known in target.implementations):
        raise OptionError(f"{operation} already has an implementation {name!r}", hint="choose another name")
    probe = checked_here(operation, name, tier=TIER) if check else None
    if target.terms is not None:
        implementation = Implementation(TIER, name, refuses, lambda terms: call(*terms), probe)
    else:
        implementation = Implementation(TIER, name, refuses, call, probe)
    target.register(implementation)
    # The choice of one operation may depend on that of another.
    forget_choices()

    def remove() -> None:
        if implementation in target.implementations:
            target.implementations.remove(implementation)
            forget_choices()

    return remove
