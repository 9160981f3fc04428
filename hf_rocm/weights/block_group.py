"""Groups whose weights are joined in one or several allocations: the base of fused, sharded and stacked layers.

Every parameter keeps its identity and has its own storage over its part of an allocation. The kinds of groups differ
in the layers that are eligible and in the allocations that they form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.nn import Module, Parameter
from torch.nn.modules.linear import Linear

from hf_rocm.layers.grouped_linear import hooks_on_all, intact, live
from hf_rocm.layers.weight_group import MOVED, NOT_PREPARED, PENDING, SLOT, WeightGroup, idle, is_idle, kind_in, lock
from hf_rocm.weights.fused_storage import capturing, is_aliased, own_memory
from hf_rocm.weights.moves import follow_moves

SHARED = (
    "other tensors share the memory of its weights (another model, or a state dict in use?): "
    "its layers are fused once those tensors are gone"
)


class BlockGroup(WeightGroup):
    """A group whose `parts` are in `weight` [N_1 + N_2 + …, K] and `bias`, or in several such allocations."""

    only_in_overlays = True
    moved: ClassVar[str] = "the weights were replaced or moved after fusing; hf_rocm.prepare(model) fuses them again"

    @classmethod
    def refusal(cls, module: Module, names: tuple[str, ...]) -> str | None:
        """Return the reason why these layers can't be joined, as a sentence, or None if they can be joined."""
        raise NotImplementedError

    @classmethod
    def pending(cls, module: Module, names: tuple[str, ...]) -> str | None:
        """Return the reason why the first call would not join these eligible layers, or None."""
        return SHARED if cls.shares(module, names) else None

    @classmethod
    def shares(cls, module: Module, names: Sequence[str]) -> bool:
        """Return whether other tensors share the memory of these weights and would not be moved with them."""
        weights = (weight for layer in cls.layers(module, names) for weight in layer._parameters.values())
        return any(type(weight) is Parameter and not weight.is_meta and is_aliased(weight) for weight in weights)

    @classmethod
    def can_wait(cls, module: Module, names: tuple[str, ...]) -> bool:
        """Return whether joining is deferred to the first call or to the move to a GPU."""
        return False

    @classmethod
    def join(cls, module: Module, names: tuple[str, ...]) -> None:
        """Move the weights of eligible layers into the group's allocations, and store the group in the slot."""
        raise NotImplementedError

    @classmethod
    def layers(cls, module: Module, names: Sequence[str]) -> list[Any]:
        """Return the linear layers with these names, without those that the module does not have."""
        children = (module._modules.get(name) for name in names)
        return [child for child in children if child is not None]

    @classmethod
    def form(cls, module: Module, names: tuple[str, ...]) -> str | None:
        with lock, torch.no_grad():
            if _is_pending(cls, module, names) and cls.can_wait(module, names):
                return cls.refusal(module, names)
            # `live` drops a group whose weights were moved.
            group = live(module)
            if type(group) is not cls or group.names != names:
                reason = cls.refusal(module, names)
                if reason is not None:
                    return reason
                if isinstance(group, BlockGroup):
                    kind = type(group)
                    del group
                    kind.restore(module)
                waits = cls.can_wait(module, names)
                shared = not waits and cls.shares(module, names)
                if waits or shared:
                    module.__dict__[SLOT] = idle(cls, PENDING, names)
                else:
                    cls.join(module, names)
                follow_moves(module)
                return SHARED if shared else None
            follow_moves(module)
            return None

    @classmethod
    def why_not(cls, module: Module, names: tuple[str, ...]) -> str | None:
        group = module.__dict__.get(SLOT)
        reason = cls.refusal(module, names)
        if reason is not None:
            return reason
        if kind_in(module) is not cls:
            return NOT_PREPARED
        if is_idle(group, MOVED):
            return cls.moved
        if hooks_on_all():
            return "forward hooks are registered on all modules"
        if is_idle(group, PENDING):
            reason = cls.pending(module, names)
            if reason is not None:
                return reason
        elif not intact(module, group):  # type: ignore[arg-type]
            return cls.moved
        if torch.is_grad_enabled() and cls.requires_grad(module, names):
            return "gradients are enabled and the weights require them: use torch.no_grad() or torch.inference_mode()"
        return None

    @classmethod
    def requires_grad(cls, module: Module, names: Sequence[str]) -> bool:
        layers = cls.layers(module, names)
        return any(parameter.requires_grad for layer in layers for parameter in layer.parameters(recurse=False))

    @classmethod
    def wake(cls, module: Module, names: tuple[str, ...]) -> None:
        if capturing() or cls.shares(module, names):
            return
        with lock:
            if not _is_pending(cls, module, names):
                # Another thread was faster.
                return
            if cls.refusal(module, names) is not None or cls.pending(module, names) is not None:
                return
            if torch.is_grad_enabled() and cls.requires_grad(module, names):
                return
            with torch.no_grad():
                cls.join(module, names)
            follow_moves(module)

    @classmethod
    def resume(cls, module: Module, names: tuple[str, ...]) -> None:
        module.__dict__[SLOT] = idle(cls, PENDING, names)
        with torch.no_grad():
            if cls.refusal(module, names) is None and not cls.can_wait(module, names):
                live(module)

    def suspend(self, module: Module) -> bool:
        if not intact(module, self):
            self.forget(module)
            return False
        # Delete the reference, so that the group's memory is freed as the parameters leave it.
        del module.__dict__[SLOT]
        return True

    def forget(self, module: Module) -> WeightGroup | None:
        with lock:
            # If the slot contains another group, another thread was faster.
            if module.__dict__.get(SLOT) is self:
                module.__dict__[SLOT] = idle(type(self), MOVED, self.names)
                self.leave(module)
        return None

    def leave(self, module: Module, *, shared: bool = False) -> None:
        """Move parameters that are still in this group to their own memory.

        A single parameter that is not moved would keep its whole allocation alive. Does nothing during a graph capture.
        shared: also move parameters whose memory is shared with another tensor.
        """
        if capturing():
            return
        for part in self.parts:
            layer = part.layer(module)
            for label, address in (("weight", part.weight), ("bias", part.bias)) if type(layer) is Linear else ():
                parameter = layer._parameters.get(label)
                memory = parameter if type(parameter) is Parameter else self.memory_of(parameter)
                if memory is not None and memory.data_ptr() == address and (shared or not is_aliased(memory)):
                    own_memory(memory)


def _is_pending(kind: type[WeightGroup], module: Module, names: tuple[str, ...]) -> bool:
    return module.__dict__.get(SLOT) == idle(kind, PENDING, names)
