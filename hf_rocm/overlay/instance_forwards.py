"""Redirect forwards that other libraries stored on an instance to the dispatcher, even if the class was bound later."""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any

from hf_rocm import patches
from hf_rocm.overlay import bind


def adopt(module: Any) -> None:
    """Replace the stock forward with the dispatcher wherever another library stores it on this instance.

    accelerate's hooks, tensor parallelism and the collection of outputs in transformers store the forward that is
    current when they are set up. In a model that was loaded before its overlay was bound, this is the stock function.
    """
    binding = bind.binding_of(module)
    if binding is not None:
        _exchange(module, binding.stock, binding.dispatcher)


def disown(module: Any) -> None:
    """Undo `adopt`."""
    binding = bind.last_binding_of(module)
    if binding is not None:
        _exchange(module, binding.dispatcher, binding.stock)


def _exchange(module: Any, one: bind.Forward, other: bind.Forward) -> None:
    for slot in ("forward", "_old_forward"):
        forward = module.__dict__.get(slot)
        if _is_bound(forward, one, module):
            patches.exchange(module.__dict__, slot, forward, MethodType(other, module))
        cell = _enclosed(forward)
        if cell is not None and _is_bound(cell.cell_contents, one, module):
            patches.exchange(cell, "cell_contents", cell.cell_contents, MethodType(other, module))


def _is_bound(method: Any, function: bind.Forward, module: Any) -> bool:
    return getattr(method, "__func__", None) is function and method.__self__ is module


def enclosed_forward(forward: Any) -> Any:
    """Return the forward inside transformers' wrapper for sharded modules. Returns any other forward unchanged."""
    cell = _enclosed(forward)
    return forward if cell is None else cell.cell_contents


def _enclosed(forward: Any) -> Any:
    """The cell with the original forward in transformers' wrapper for sharded modules; None for any other forward."""
    if not isinstance(forward, FunctionType) or not str(forward.__module__).startswith("transformers."):
        return None
    names = forward.__code__.co_freevars
    return (forward.__closure__ or ())[names.index("original_forward")] if "original_forward" in names else None
