"""Forwards of hf_rocm on instances of PyTorch's own layers. The class and other instances stay stock.

Such a forward is a bound method with the name of the stock method. A deepcopy binds it to the copy, and unpickling in a
process without hf_rocm yields the stock forward.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn

from hf_rocm import patches
from hf_rocm.patches import ABSENT

# A key in the instance's __dict__: whether the instance already had the stock forward as an attribute.
_HAD_STOCK = "_hf_rocm_found_forward"

# `_old_forward` is accelerate's name for the forward that its hook replaced and calls.
_SLOTS = ("forward", "_old_forward")

_forwards: dict[type, Callable[..., Tensor]] = {}


def declare(cls: type[nn.Module], forward: Callable[..., Tensor]) -> None:
    """Declare the forward(self, x) that `attach` sets on instances of cls. Pickles require the name `forward`."""
    _forwards[cls] = forward


def attach(module: nn.Module) -> None:
    """Set the declared forward on the instance, or behind accelerate's hook if there is one. Idempotent."""
    own = module.__dict__
    if is_attached(module):
        return
    slot = "_old_forward" if "_hf_hook" in own and "_old_forward" in own else "forward"
    if slot in own:
        # See `eligible.accepted_forward`.
        own[_HAD_STOCK] = True
    patches.exchange(own, slot, own.get(slot, ABSENT), MethodType(_forwards[type(module)], module))


def detach(module: nn.Module) -> None:
    """Undo `attach`. A different forward that was set in the meantime is kept."""
    own = module.__dict__
    had_stock = own.pop(_HAD_STOCK, False)
    for slot in _SLOTS:
        forward = own.get(slot)
        if is_declared(forward, module) or (slot == "forward" and is_class_forward(forward, module)):
            # accelerate's hook calls `_old_forward`.
            needed = had_stock or slot != "forward"
            stock = MethodType(_stock_forward(module), module) if needed else ABSENT
            patches.exchange(own, slot, forward, stock)


def is_attached(module: nn.Module) -> bool:
    """Whether a call of this layer runs the declared forward."""
    return any(is_declared(module.__dict__.get(slot), module) for slot in _SLOTS)


def is_declared(method: Any, module: nn.Module) -> bool:
    """Whether `method` is a declared forward, bound to this instance."""
    return getattr(method, "__func__", None) in _forwards.values() and method.__self__ is module


def is_class_forward(method: Any, module: nn.Module) -> bool:
    """Whether `method` is the forward of the class, bound to this instance, as it is after unpickling."""
    return getattr(method, "__func__", None) is type(module).forward and method.__self__ is module


def _stock_forward(module: nn.Module) -> Any:
    """The forward of the stock class, even for an instance whose class was replaced by a subclass."""
    cls = next(base for base in type(module).__mro__ if base in _forwards)
    return patches.original(cls, "forward")
