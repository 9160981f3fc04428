"""Fuse linear layers with the same input into one, without a second copy of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.linear import Linear

from hf_rocm import ops
from hf_rocm.layers.grouped_linear import intact
from hf_rocm.layers.weight_group import PENDING, SLOT, Part, idle, is_idle, kind_in, lock, names_in, register
from hf_rocm.weights import linear_hook, traced
from hf_rocm.weights.block_group import BlockGroup
from hf_rocm.weights.eligible import accept_forward, refusal
from hf_rocm.weights.fused_storage import enter_block, join_parameters, part_memory, release_joined
from hf_rocm.weights.mmap_pages import is_mapped
from hf_rocm.weights.moves import waits_for_gpu
from hf_rocm.weights.sharded import Shards
from hf_rocm.weights.shuffled_copy import ShuffledCopy
from hf_rocm.weights.tensor_parallel import is_sharded


@register
class Fused(BlockGroup):
    """A fused group. weight: [N_1 + N_2 + …, K]; bias: [N_1 + …] or None."""

    order = 90

    def __init__(
        self, module: Module, weight: Tensor, bias: Tensor | None, sizes: tuple[int, ...], parts: tuple[Part, ...]
    ) -> None:
        self.module = ref(module)
        self.weight, self.bias = weight, bias
        self.names, self.sizes, self.parts = tuple(part.name for part in parts), sizes, parts
        self._copy: ShuffledCopy | None = None
        self._choose()

    @property
    def copy(self) -> ShuffledCopy | None:
        """A shuffled copy of the weight, or None; see preshuffle.py."""
        return self._copy

    @copy.setter
    def copy(self, copy: ShuffledCopy | None) -> None:
        self._copy = copy
        self._choose()

    def _choose(self) -> None:
        """Update `plain`, which is False if there is a copy, or an instance forward (`route_linear`, accelerate)."""
        self.plain = self._copy is None and all(part.forward is None for part in self.parts)

    @classmethod
    def names_for(cls, module: Module, binding: Any) -> tuple[str, ...]:
        return tuple(binding.fuses)

    @classmethod
    def refusal(cls, module: Module, names: tuple[str, ...]) -> str | None:
        return refusal(module, names)

    @classmethod
    def pending(cls, module: Module, names: tuple[str, ...]) -> str | None:
        if waits_for_gpu(module, _first_weight(module, names)):
            return "the model is on the CPU, where the stock forward runs; moving the model to a GPU fuses its layers"
        return super().pending(module, names)

    @classmethod
    def can_wait(cls, module: Module, names: tuple[str, ...]) -> bool:
        weight = _first_weight(module, names)
        return waits_for_gpu(module, weight) or is_mapped(weight)

    @classmethod
    def join(cls, module: Module, names: tuple[str, ...]) -> None:
        others = [child for name, child in module._modules.items() if type(child) is Linear and name not in names]
        neighbours = [linear._parameters["weight"] for linear in others]
        module.__dict__[SLOT] = _join(module, {name: module._modules[name] for name in names}, neighbours)

    @classmethod
    def restore(cls, module: Module) -> None:
        with lock:
            names = names_in(module)
            group = module.__dict__.pop(SLOT, None)
            if is_idle(group, PENDING):
                # No weight has been moved yet.
                return
            if isinstance(group, Fused):
                group.unshuffle(module)
            del group
            part_memory(module, names)

    def multiply(self, module: Module, x: Tensor, norm: ops.Norm | None, activation: str | None) -> Tensor | None:
        if x.requires_grad and torch.is_grad_enabled():
            return None
        first = self.parts[0]
        if first.forward is not None and x.device != self.weight.device:
            # accelerate's hook moves x to the layer's device.
            return None
        backend = first.layer(module).__dict__.get(linear_hook.BACKEND)
        if self._copy is not None or backend not in (None, "auto"):
            return super().multiply(module, x, norm, activation)
        if norm is None and activation is None:
            return ops.linear(x, self.weight, self.bias)
        return ops.fused_linear(x, self.weight, self.bias, norm=norm, activation=activation)

    def linear(self, module: Module, x: Tensor) -> Tensor | None:
        backend = self.parts[0].layer(module).__dict__.get(linear_hook.BACKEND)
        if backend is not None and backend != "auto":
            return linear_hook.multiply(x, self.weight, self.bias, backend)
        return self.gemm(x, [part.layer(module)._parameters["weight"] for part in self.parts])

    def gemm(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Return x Wᵀ + bias, with the shuffled copy if it serves x. weights: the parameters that form the block."""
        shuffled = None if self._copy is None else self._copy.serves(x, weights)
        if shuffled is None:
            return ops.linear(x, self.weight, self.bias)
        return ops.shuffled_linear(x, shuffled, self.bias)

    def traced(self, module: Module, x: Tensor) -> Tensor | None:
        return traced.fused_output(module, x, self)

    def accepts(self, module: Module, linear: Module, name: str) -> bool:
        accepted = accept_forward(self, linear, name)
        if accepted:
            self._choose()
        return accepted

    def unshuffle(self, module: Module) -> None:
        if self._copy is not None:
            self._copy.drop()
            self.copy = None

    def shuffled_data(self, module: Module) -> Tensor | None:
        return None if self._copy is None or self._copy.shuffled is None else self._copy.shuffled.data

    def extra_bytes(self, module: Module) -> int:
        return 0 if self._copy is None else self._copy.extra_bytes(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> object:
        # A module's children are copied before attributes that were added later, so the copied layers exist already.
        # They are fused here, because the first call does not fuse them if it runs compiled.
        module = self.module()
        twin = None if module is None else memo.get(id(module))
        if module is None or twin is None or not intact(module, self):
            return idle(Fused, PENDING, self.names)
        linears = {name: memo.get(id(module._modules[name])) for name in self.names}
        copies: Any = SimpleNamespace(_modules=linears)
        if None in linears.values() or refusal(copies, self.names) is not None:
            return idle(Fused, PENDING, self.names)
        return _join(twin, linears)


def fuse(module: Module, names: Sequence[str]) -> str | None:
    """Fuse these `nn.Linear` children of a module in place, in order. For sharded layers, fuse this rank's rows.

    Returns None if they are fused now, or if fusing is deferred to the first use of the group or to the move to a GPU.
    It is deferred for weights that are still mapped from the checkpoint, and for weights on the CPU of a module that
    hf_rocm serves only on a GPU. Otherwise returns the reason as a sentence, and no weight has changed. If the reason
    is that other tensors share the memory of the weights, a call fuses the layers once those tensors are gone. At its
    peak, memory use is higher by one block, plus the tensors that lie between the weights in memory if they are moved.
    """
    return _kind(module, names).form(module, tuple(names))


def unfuse(module: Module) -> None:
    """Move the parameters of a fused group back to their own ordinary memory. Values and objects do not change.

    Parameters whose memory is shared with another tensor are moved only if they are sharded.
    """
    kind = kind_in(module)
    if kind in (Fused, Shards):
        kind.restore(module)


def why_not(module: Module, names: Sequence[str]) -> str | None:
    """Return why this group's next call would not run fused, as a sentence, or None. Changes nothing."""
    return _kind(module, names).why_not(module, tuple(names))


def _kind(module: Module, names: Sequence[str]) -> type[BlockGroup]:
    return Shards if is_sharded(module, names) else Fused


def _join(module: Module, children: dict[str, Any], neighbours: Sequence[Any] = ()) -> Fused:
    """Move the weights of these layers into one block and the biases into another. The layers must be eligible."""
    names, linears = tuple(children), list(children.values())
    weights = [linear._parameters["weight"] for linear in linears]
    biases = [linear._parameters["bias"] for linear in linears]
    weight = join_parameters(weights, neighbours)
    bias = None if biases[0] is None else join_parameters(biases)
    parts = tuple(
        Part(
            owner=None,
            name=name,
            forward=linear.__dict__.get("forward"),
            hooks=(),
            weight=own_weight.data_ptr(),
            nbytes=own_weight.nbytes,
            bias=None if own_bias is None else own_bias.data_ptr(),
        )
        for name, linear, own_weight, own_bias in zip(names, linears, weights, biases, strict=True)
    )
    group = Fused(module, weight, bias, tuple(len(own) for own in weights), parts)
    enter_block(group)
    release_joined(weight)
    return group


def _first_weight(module: Module, names: Sequence[str]) -> Tensor:
    linear: Any = module._modules[names[0]]
    weight: Tensor = linear.weight
    return weight
