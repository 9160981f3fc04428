"""Implementations of the user's own: traced, checked and named like ours, and preferred to them."""

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
    """Offer another way to compute an operation.

    operation: `attention`, `linear`, … name: how `explain` calls it. call: takes what the operation's eager
    implementation takes, and returns the same. refuses(spec, device): why it can't serve a specification, in a
    sentence, or None; it is asked once per specification, so it must be cheap and without side effects. check:
    compare it with the eager tier before its first use, in this process.

    It comes before every other implementation that doesn't refuse; `HF_ROCM_TIER=user` asks for it by name.
    Returns the function that takes it away again. Raises `OptionError` on an unknown operation or a name that is taken.
    """
    known = operations()
    if operation not in known:
        raise OptionError(f"there is no operation {operation!r}", facts={"operations": ", ".join(sorted(known))})
    target = known[operation]
    if any((each.tier, each.name) == (TIER, name) for each in target.implementations):
        raise OptionError(f"{operation} has an implementation {name!r} already", hint="take another name")
    probe = checked_here(operation, name, tier=TIER) if check else None
    implementation = Implementation(TIER, name, refuses, call, probe)
    target.register(implementation)
    forget_choices()  # one operation's may rest on another's

    def remove() -> None:
        if implementation in target.implementations:
            target.implementations.remove(implementation)
            forget_choices()

    return remove
