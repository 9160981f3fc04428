"""Lists of experts, stacked into two blocks without a second copy.

Up to transformers 4.57, most mixture-of-experts layers have an `nn.ModuleList` of gated MLPs. Their weights are moved
into the blocks that `ops.experts` reads. Every parameter remains the same object, with a storage that covers its part
of the block, and every call checks all parameters. If a model is changed after stacking, the worst outcome is that
stock's loop runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter

from hf_rocm import ops
from hf_rocm.layers.weight_group import MOVED, PENDING, SLOT, Part, idle, is_idle, lock, names_in, register
from hf_rocm.weights.block_group import BlockGroup
from hf_rocm.weights.eligible import refusal
from hf_rocm.weights.fused_storage import is_aliased, join_parameters, own_memory
from hf_rocm.weights.shuffled_copy import ExpertCopies

# The name of the child with the list.
LIST = "experts"


@register
class Stacked(BlockGroup):
    """Stacked experts. gate_up: [E, 2I, H], gate first; down: [E, H, I]; biases [E, 2I] and [E, H], or None.

    names: the names of an expert's gate, up and down layers and of its activation.
    """

    order = 50
    structured = True
    moved = "the experts' weights were replaced or moved after stacking; hf_rocm.prepare(model) stacks them again"

    def __init__(self, module: Module, names: tuple[str, ...]) -> None:
        gate, up, down, activation = names
        self.names = names
        self.experts = list(_experts(module))
        pairs = [expert._modules[name] for expert in self.experts for name in (gate, up)]
        downs = [expert._modules[down] for expert in self.experts]
        self.gate_up, self.gate_up_bias = _blocks(pairs, len(self.experts))
        self.down, self.down_bias = _blocks(downs, len(self.experts))
        self.copies: ExpertCopies | None = None
        self.parts = tuple(_part(expert, name) for expert in self.experts for name in (gate, up, down))
        # The expected state of the modules that contain the layers, in flat lists that are fast to check.
        self._children = [(expert._modules, name) for expert in self.experts for name in names]
        self._expected: list[Any] = [children[name] for children, name in self._children]
        self.activation: Any = self._expected[len(names) - 1]
        activations: list[Any] = [expert._modules[activation] for expert in self.experts]
        containers: list[Any] = [*self.experts, *activations]
        self._containers = containers
        self._own = [module.__dict__ for module in containers]
        self._hooks = [own[kind] for own in self._own for kind in ("_forward_hooks", "_forward_pre_hooks")]
        self._classes = [type(module) for module in containers]
        self._forward = type(self.experts[0]).forward

    @classmethod
    def names_for(cls, module: Module, binding: Any) -> tuple[str, ...]:
        return tuple(binding.experts)

    @classmethod
    def label(cls, names: Sequence[str]) -> list[str]:
        return [LIST]

    @classmethod
    def parameters(cls, module: Module, names: Sequence[str]) -> list[Tensor | None]:
        return [parameter for member in cls.covers(module) for parameter in member.parameters(recurse=False)]

    @classmethod
    def covers(cls, module: Module) -> list[Module]:
        return [member for expert in _experts(module) for member in expert.modules()]

    @classmethod
    def layers(cls, module: Module, names: Sequence[str]) -> list[Any]:
        linears = (expert._modules.get(name) for expert in _experts(module) for name in names[:3])
        return [linear for linear in linears if linear is not None]

    @classmethod
    def refusal(cls, module: Module, names: tuple[str, ...]) -> str | None:
        return _refusal(module, names)

    @classmethod
    def why_not(cls, module: Module, names: tuple[str, ...]) -> str | None:
        reason = super().why_not(module, names)
        if reason is None and is_idle(module.__dict__.get(SLOT), PENDING):
            return "this is a copy of a prepared model: its first call without gradients stacks the experts"
        return reason

    @classmethod
    def join(cls, module: Module, names: tuple[str, ...]) -> None:
        group = module.__dict__[SLOT] = Stacked(module, names)
        if group.gate_up.is_cuda:
            # The freed allocations are too small for the next block.
            torch.cuda.empty_cache()

    @classmethod
    def wake(cls, module: Module, names: tuple[str, ...]) -> None:
        super().wake(module, names)
        with lock:
            if is_idle(module.__dict__.get(SLOT), PENDING) and _refusal(module, names) is not None:
                module.__dict__[SLOT] = idle(cls, MOVED, names)

    @classmethod
    def restore(cls, module: Module) -> None:
        with lock:
            names = names_in(module)
            group = module.__dict__.pop(SLOT, None)
            if isinstance(group, Stacked):
                group.unshuffle(module)
            del group
            parameters = [
                parameter
                for layer in cls.layers(module, names)
                for parameter in layer.parameters(recurse=False)
                if type(parameter) is Parameter and not parameter.is_meta and not is_aliased(parameter)
            ]
            for parameter in parameters:
                own_memory(parameter)
            if any(parameter.is_cuda for parameter in parameters):
                torch.cuda.empty_cache()

    def unchanged(self, module: Module) -> bool:
        experts = _experts(module)
        if len(experts) != len(self.experts) or not all(map(is_, experts, self.experts)):
            self.forget(module)
            return False
        # a child may be replaced temporarily, for example by an adapter around it, so the group is kept
        if not all(map(is_, [children.get(name) for children, name in self._children], self._expected)):
            return False
        if any(self._hooks) or type(experts[0]).forward is not self._forward:
            return False
        return not any("forward" in own for own in self._own) and all(
            map(is_, map(type, self._containers), self._classes)
        )

    def leave(self, module: Module, *, shared: bool = False) -> None:
        """Do nothing: the experts remain in the blocks, because copying all of them would double their memory."""

    def unshuffle(self, module: Module) -> None:
        if self.copies is not None:
            self.copies.drop()
            self.copies = None

    def shuffled_experts(self, module: Module, x: Tensor) -> tuple[ops.Shuffled, ops.Shuffled] | None:
        if self.copies is None or module.__dict__.get(SLOT) is not self:
            return None
        return self.copies.serve(x, *self.weights())

    def weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters that form gate_up, and those that form down."""
        linears: list[Any] = [(part.owner or {}).get(part.name) for part in self.parts]
        weights = [linear._parameters["weight"] for linear in linears]
        return [weight for index, weight in enumerate(weights) if index % 3 < 2], weights[2::3]

    def nbytes(self, module: Module) -> int:
        blocks = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return sum(block.nbytes for block in blocks if block is not None)

    def extra_bytes(self, module: Module) -> int:
        return 0 if self.copies is None else self.copies.nbytes


def _part(expert: Module, name: str) -> Part:
    linear: Any = expert._modules[name]
    weight, bias = linear._parameters["weight"], linear._parameters["bias"]
    return Part(
        owner=expert._modules,
        name=name,
        forward=linear.__dict__.get("forward"),
        hooks=(),
        weight=weight.data_ptr(),
        nbytes=weight.nbytes,
        bias=None if bias is None else bias.data_ptr(),
    )


def _experts(module: Module) -> list[Module]:
    listed = module._modules.get(LIST)
    return list(listed._modules.values()) if type(listed) is ModuleList else []


def _refusal(module: Module, names: Sequence[str]) -> str | None:
    experts = _experts(module)
    if len(experts) < 2:
        return "there is no list of two or more experts"
    gate, up, down, activation = names
    for index, expert in enumerate(experts):
        if type(expert) is not type(experts[0]):
            return f"experts 0 and {index} are of different classes"
        if expert._forward_hooks or expert._forward_pre_hooks:
            return f"expert {index} has a forward hook"
        if "forward" in expert.__dict__:
            return f"expert {index} has its own forward"
        function = expert._modules.get(activation)
        if function is None or activation in expert.__dict__:
            return f"the activation of expert {index} is not a submodule"
        if type(function) is not type(experts[0]._modules[activation]):
            return f"the activation of expert {index} differs from that of expert 0"
        if function._forward_hooks or function._forward_pre_hooks or "forward" in function.__dict__:
            return f"the activation of expert {index} was changed"
    if not getattr(type(experts[0]).forward, "__module__", "").startswith("transformers.models."):
        return f"{type(experts[0]).__name__}.forward was replaced"
    for group in ((gate, up), (down,)):
        joined: Any = Module()
        joined._modules = {
            f"{LIST}.{index}.{name}": expert._modules.get(name)
            for index, expert in enumerate(experts)
            for name in group
        }
        reason = refusal(joined, tuple(joined._modules))
        if reason is not None:
            return reason
    biased = {name: experts[0]._modules[name].bias is not None for name in (gate, down)}  # type: ignore[union-attr]
    return "only some of the layers have a bias" if len(set(biased.values())) > 1 else None


def _blocks(linears: Sequence[Any], count: int) -> tuple[Tensor, Tensor | None]:
    """Join the weights of these layers into [E, N, K], and their biases into [E, N]. N: the rows of one expert."""
    weight = join_parameters([linear._parameters["weight"] for linear in linears]).unflatten(0, (count, -1))
    biases = [linear._parameters["bias"] for linear in linears]
    return weight, None if biases[0] is None else join_parameters(biases).unflatten(0, (count, -1))
