"""Rebuild a module's weight group after `.to()`, `.half()` and similar methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from hf_rocm.layers.weight_group import PENDING, SLOT, WeightGroup, is_idle, kind_in, names_in
from hf_rocm.overlay import bind


def follow_moves(module: Module) -> None:
    """Attach an `_apply` to the module's class if the class is bound. Unbinding removes it."""
    cls = type(module)
    if bind.binding_of(module) is not None and "_apply" not in cls.__dict__:
        bind.attach(cls, "_apply", _apply_and_resume(cls))


def waits_for_gpu(module: Module, weight: Tensor) -> bool:
    """Whether a group with this weight is formed only on a GPU, because on the CPU the stock forward runs."""
    return bind.mode_of(module) == bind.GPU and weight.device.type == "cpu"


def _apply_and_resume(cls: type[Any]) -> Callable[..., Any]:
    def _apply(self: Any, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.__dict__.get(SLOT), WeightGroup) and _changes_nothing(fn, self):
            return super(cls, self)._apply(fn, *args, **kwargs)
        # Keep no reference to the group, so that its memory is freed while the parameters are moved.
        suspended = _suspend(self)
        result = super(cls, self)._apply(fn, *args, **kwargs)
        if suspended is not None:
            kind, names = suspended
            kind.resume(self, names)
        return result

    return _apply


def _changes_nothing(fn: Callable[[Tensor], Tensor], module: Module) -> bool:
    """Whether `fn` returns this module's tensors themselves, as `.to()` does with their current device and dtype.

    Some libraries call `.to(device)` before every use of a model. The group and everything recorded with it must be
    kept.
    """
    for device, dtype in {(tensor.device, tensor.dtype) for tensor in (*module.parameters(), *module.buffers())}:
        probe = torch.empty(1, device=device, dtype=dtype)
        # share_memory_() moves a tensor in place.
        if fn(probe) is not probe or (device.type == "cpu" and probe.is_shared()):
            return False
    return True


def _suspend(module: Module) -> tuple[type[WeightGroup], tuple[str, ...]] | None:
    """Return the kind and the names of the group to resume after the move, or None."""
    kind, names = kind_in(module), names_in(module)
    group = module.__dict__.get(SLOT)
    if kind is None:
        return None
    suspended = is_idle(group, PENDING) if isinstance(group, tuple) else group.suspend(module)  # type: ignore[union-attr]
    return (kind, names) if suspended else None
