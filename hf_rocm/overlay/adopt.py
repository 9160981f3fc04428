"""Forwards that others keep on an instance: what they call must be the dispatcher, whenever the overlay was bound."""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any

from hf_rocm.overlay import bind


def adopt(module: Any) -> None:
    """Have what holds this instance's stock forward call ours.

    accelerate's hooks, tensor parallelism, and transformers while it collects outputs keep the forward that they found
    when they were put on: in a model that was loaded before its overlay was bound, that is the stock function itself.
    """
    binding = bind.binding_of(module)
    if binding is not None and binding.dispatcher is not None:
        _exchange(module, binding.stock, binding.dispatcher)


def disown(module: Any) -> None:
    """The opposite of `adopt`."""
    binding = bind.last_binding_of(module)
    if binding is not None and binding.dispatcher is not None:
        _exchange(module, binding.dispatcher, binding.stock)


def _exchange(module: Any, one: bind.Forward, other: bind.Forward) -> None:
    for slot in ("forward", "_old_forward"):
        found = module.__dict__.get(slot)
        if _is_bound(found, one, module):
            module.__dict__[slot] = MethodType(other, module)
        cell = _enclosed(found)
        if cell is not None and _is_bound(cell.cell_contents, one, module):
            cell.cell_contents = MethodType(other, module)


def _is_bound(found: Any, function: bind.Forward, module: Any) -> bool:
    return getattr(found, "__func__", None) is function and found.__self__ is module


def enclosed_forward(forward: Any) -> Any:
    """What tensor parallelism of transformers found as a module's forward and calls; any other forward as it is."""
    cell = _enclosed(forward)
    return forward if cell is None else cell.cell_contents


def _enclosed(forward: Any) -> Any:
    """The cell of the closure with which transformers shards a module; None for any other forward."""
    if not isinstance(forward, FunctionType) or not str(forward.__module__).startswith("transformers."):
        return None
    names = forward.__code__.co_freevars
    return (forward.__closure__ or ())[names.index("original_forward")] if "original_forward" in names else None
