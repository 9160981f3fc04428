"""The weight group of a module: the slot that contains it, and the protocol that every kind of group implements.

A group replaces layers whose weights belong together (fused, sharded, quantised, shuffled, stacked). The kinds are
subclasses in `hf_rocm.weights`. The modules of `layers` don't import them, except when a module with an idle group
needs its kind.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.nn import Module

from hf_rocm import ops

# In the module's __dict__: a `WeightGroup`, or an idle group as plain builtins: (kind, state, name, …). Except for
# quantised modules, copies and pickles contain only builtins, so that a process without hf_rocm can read them: an idle
# group, or False or None if the copy has no group.
SLOT = "_hf_rocm_group"

# The group is formed in the module's next call.
PENDING = "pending"
# The weights were replaced or moved, so the group is not used until the model is prepared again.
MOVED = "moved"

# The reason why a module without a group is not fused.
NOT_PREPARED = "its layers were not prepared"

# Checks need no lock, but changes do: two threads may make the first call of a copy at the same time.
lock = threading.RLock()

_KINDS_IN = "hf_rocm.weights."


class Part(NamedTuple):
    """The state of a linear layer that must not change while the group replaces it."""

    # The dict of children with this layer; None: that of the group's module.
    owner: dict[str, Module | None] | None
    name: str
    # An instance forward that changes nothing, or None.
    forward: object
    hooks: tuple[object, ...]
    # The address of the weight.
    weight: int
    # The size of the weight.
    nbytes: int
    # The address of the bias.
    bias: int | None

    def layer(self, module: Module) -> Any:
        return (module._modules if self.owner is None else self.owner).get(self.name)


class WeightGroup:
    """The protocol of a kind of group, with defaults. Class methods concern a module, other methods a group.

    A group that depends on addresses lists them as `parts`, and `live` compares them on every call. `plain`: the result
    is x Wᵀ + bias with the attributes `weight` [N_1 + N_2 + …, K] and `bias` [N_1 + …], without any other condition.
    """

    # If several kinds fit, the one with the lowest order is used; `restore` follows the same order.
    order = 50
    # Whether only an overlay's forward uses groups of this kind.
    only_in_overlays = False

    # The names of the layers.
    names: tuple[str, ...] = ()
    # N_1, N_2, …
    sizes: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()
    plain = False
    # Whether `unchanged` is part of the check.
    structured = False
    weight: Any = None
    bias: Tensor | None = None

    @classmethod
    def names_for(cls, module: Module, binding: Any) -> tuple[str, ...]:
        """Return the names of the layers that this kind groups in a module with this binding; empty if none."""
        return ()

    @classmethod
    def label(cls, names: Sequence[str]) -> list[str]:
        """Return the names of these layers in a report."""
        return list(names)

    @classmethod
    def parameters(cls, module: Module, names: Sequence[str]) -> list[Tensor | None]:
        """Return the parameters that must not share memory with other tensors of the model."""
        layers = (module._modules.get(name) for name in names)
        return [parameter for layer in layers if layer is not None for parameter in layer._parameters.values()]

    @classmethod
    def covers(cls, module: Module) -> list[Module]:
        """Return the submodules whose weights are in the module's group, so that they form no group themselves."""
        return []

    @classmethod
    def form(cls, module: Module, names: tuple[str, ...]) -> str | None:
        """Form the group in place. Returns None, or the reason why it can't be formed; the module is then unchanged."""
        raise NotImplementedError

    @classmethod
    def why_not(cls, module: Module, names: tuple[str, ...]) -> str | None:
        """Return why the next call would not use this group, as a sentence; None if it would. Changes nothing."""
        return None

    @classmethod
    def restore(cls, module: Module) -> None:
        """Restore the module's own layers and parameters, and clear its slot. Values and objects do not change."""
        module.__dict__.pop(SLOT, None)

    @classmethod
    def restore_model(cls, model: Module) -> None:
        """Restore all modules of a model that have a group of this kind.

        Raises an error, without changing anything, if that is impossible.
        """
        for module in model.modules():
            if kind_in(module) is cls:
                cls.restore(module)

    @classmethod
    def wake(cls, module: Module, names: tuple[str, ...]) -> None:
        """Form a pending group, if that is possible now. Called in the module's next call."""

    @classmethod
    def resume(cls, module: Module, names: tuple[str, ...]) -> None:
        """Form the group again after `.to()` or a similar method."""

    def suspend(self, module: Module) -> bool:
        """Prepare for `.to()` or a similar method. Returns whether `resume` must be called afterwards."""
        return False

    def multiply(self, module: Module, x: Tensor, norm: ops.Norm | None, activation: str | None) -> Tensor | None:
        """Return the output of a live group that is not plain, or None if the layers must be called."""
        if norm is not None:
            x = ops.rms_norm(x, norm.weight, eps=norm.eps, one_plus=norm.one_plus)
        joined = self.linear(module, x)
        return joined if joined is None or activation is None else ops.act_and_mul(joined, activation=activation)

    def linear(self, module: Module, x: Tensor) -> Tensor | None:
        """Return the concatenated outputs of the layers, or None."""
        return None

    def traced(self, module: Module, x: Tensor) -> Tensor | None:
        """Return the output while torch.compile traces, or None."""
        return None

    def memory_of(self, parameter: Any) -> Tensor | None:
        """Return the tensor with the values of a parameter that is not a plain `nn.Parameter`, or None."""
        return None

    def accepts(self, module: Module, linear: Module, name: str) -> bool:
        """Return whether an instance forward other than that of the `Part` is harmless."""
        return False

    def unchanged(self, module: Module) -> bool:
        """Return whether the modules around the layers are unchanged."""
        return True

    def forget(self, module: Module) -> WeightGroup | None:
        """Handle a weight that has left the group. Returns the group that can be used instead, or None."""
        module.__dict__.pop(SLOT, None)
        return None

    def unshuffle(self, module: Module) -> None:
        """Release shuffled copies, so that only the weights in their original order are used."""

    def shuffled_data(self, module: Module) -> Tensor | None:
        """Return the shuffled weight [N, K] that GEMMs use now, or None."""
        return None

    def shuffled_experts(self, module: Module, x: Tensor) -> tuple[ops.Shuffled, ops.Shuffled] | None:
        """Return shuffled copies of gate_up and down of routed experts for x [T, H], or None."""
        return None

    def nbytes(self, module: Module) -> int:
        """Return the size in bytes of the weights and biases that the group uses."""
        return 0 if self.weight is None else self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def extra_bytes(self, module: Module) -> int:
        """Return the memory in bytes that the group needs in addition to the parameters and buffers of the module."""
        return 0

    def __reduce__(self) -> tuple[object, ...]:
        return (tuple, (idle(type(self), PENDING, self.names),))


class PackedLinear(Module):
    """The protocol of a module that replaces an `nn.Linear` and has no parameters."""

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return residual + self.forward(x)."""
        raise NotImplementedError


KindT = TypeVar("KindT", bound=type[WeightGroup])

_kinds: dict[str, type[WeightGroup]] = {}


def register(kind: KindT) -> KindT:
    """Register a kind under the name that identifies it in idle groups."""
    _kinds[_name(kind)] = kind
    return kind


def registered() -> list[type[WeightGroup]]:
    """Return all imported kinds, in the order in which they are tried."""
    return sorted(_kinds.values(), key=lambda kind: kind.order)


def kind_in(module: Module) -> type[WeightGroup] | None:
    """Return the kind of the group in the module's slot, live or idle; None if the slot is empty."""
    group = module.__dict__.get(SLOT)
    if not group:
        return None
    return _kind_named(group[0]) if group.__class__ is tuple else type(group)


def names_in(module: Module) -> tuple[str, ...]:
    """Return the names of the layers of the group in the module's slot, live or idle."""
    group = module.__dict__.get(SLOT)
    if not group:
        return ()
    names: tuple[str, ...] = group[2:] if group.__class__ is tuple else group.names
    return names


def idle(kind: type[WeightGroup], state: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the slot's value for a group that is pending or was moved."""
    return (_name(kind), state, *names)


def is_idle(group: object, state: str) -> bool:
    return type(group) is tuple and group[1] == state


def wake(module: Module) -> None:
    """Form the module's group if it is pending and can be formed now."""
    group: Any = module.__dict__.get(SLOT)
    if is_idle(group, PENDING):
        _kind_named(group[0]).wake(module, group[2:])


def _name(kind: type[WeightGroup]) -> str:
    return f"{kind.__module__.removeprefix(_KINDS_IN)}.{kind.__qualname__}"


def _kind_named(name: str) -> type[WeightGroup]:
    """Return the kind with this name. Imports it if necessary, since a module may be unpickled before that import."""
    if name not in _kinds:
        import_module(_KINDS_IN + name.partition(".")[0])
    return _kinds[name]
