"""Shuffled copies of stacked experts, for aiter's `fused_moe`, which requires the shuffled layout.

The copies double the memory of the experts, so they are made only within the user's budget. They can become stale, so
every use first checks whether the weights have changed, as in `shuffled_copy.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm import ops
from hf_rocm.layers.grouped_linear import live
from hf_rocm.layers.weight_group import SLOT, WeightGroup, register
from hf_rocm.ops.moe_shuffled import aiter_refuses
from hf_rocm.overlay import bind
from hf_rocm.weights.experts import Stacked
from hf_rocm.weights.shuffled_copy import ExpertCopies

_NAMES = ("gate_up_proj", "down_proj")


@register
class CopiedExperts(WeightGroup):
    """Copies of the stacked parameters of transformers 5. (Copies of stacked lists are stored in `Stacked.copies`.)"""

    order = 40

    def __init__(self, copies: ExpertCopies) -> None:
        self.copies = copies

    @classmethod
    def form(cls, module: nn.Module, names: tuple[str, ...]) -> str | None:
        """Form the group of a module with stacked parameters. names: empty."""
        reason, _ = shuffle(module, left=None)
        return reason

    @classmethod
    def restore(cls, module: nn.Module) -> None:
        group = module.__dict__.get(SLOT)
        if isinstance(group, CopiedExperts):
            group.unshuffle(module)

    def shuffled_experts(self, module: nn.Module, x: Tensor) -> tuple[ops.Shuffled, ops.Shuffled] | None:
        parameters = _parameters(module)
        return None if parameters is None else self.copies.serve(x, *([parameter] for parameter in parameters))

    def unshuffle(self, module: nn.Module) -> None:
        self.copies.drop()
        if module.__dict__.get(SLOT) is self:
            del module.__dict__[SLOT]

    def nbytes(self, module: nn.Module) -> int:
        return self.copies.nbytes

    def extra_bytes(self, module: nn.Module) -> int:
        return self.copies.nbytes

    def __reduce__(self) -> tuple[object, ...]:
        # A copied module has no shuffled copies until it is prepared.
        return (bool, ())


def is_moe(module: nn.Module) -> bool:
    """Whether hf_rocm runs this module's experts as one block: a list that it stacks, or stacked parameters."""
    binding = bind.binding_of(module)
    return binding is not None and (bool(binding.experts) or _parameters(module) is not None)


def shuffle(module: nn.Module, left: int | None) -> tuple[str | None, int]:
    """Make shuffled copies of a module's experts. Returns (refusal or None, bytes used).

    left: the remaining budget in bytes, or None for no limit.
    """
    with torch.no_grad():
        group = live(module)
    if isinstance(group, Stacked) and group.gate_up_bias is None:
        blocks, weights = (group.gate_up, group.down), group.weights()
    else:
        parameters = None if isinstance(group, Stacked) else _parameters(module)
        if parameters is None:
            return "its experts are not stacked, or not as [gate | up] without biases", 0
        blocks, weights = parameters, ([parameters[0]], [parameters[1]])
    if any(parameter.is_inference() for part in weights for parameter in part):
        return "its weights were created under inference_mode, which does not count writes to them", 0
    reason = aiter_refuses(*blocks, _top(module))
    if reason is not None:
        return reason, 0
    nbytes = sum(block.nbytes for block in blocks)
    if left is not None and nbytes > left:
        return f"a copy takes {nbytes} bytes, but only {left} bytes of the budget are left", 0
    copies = ExpertCopies(blocks, weights)
    if isinstance(group, Stacked):
        group.copies = copies
    else:
        module.__dict__[SLOT] = CopiedExperts(copies)
    return None, nbytes


def _parameters(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter] | None:
    gate_up, down = (module._parameters.get(name) for name in _NAMES)
    if type(gate_up) is not nn.Parameter or type(down) is not nn.Parameter or gate_up.dim() != 3 or down.dim() != 3:
        return None
    if any(module._parameters.get(f"{name}_bias") is not None for name in _NAMES):
        return None
    plain = gate_up.shape == (down.shape[0], 2 * down.shape[2], down.shape[1])
    return (gate_up, down) if plain and gate_up.is_contiguous() and down.is_contiguous() else None


def _top(module: nn.Module) -> int:
    config: Any = getattr(module, "config", None)
    return int(getattr(module, "top_k", 0) or getattr(config, "num_experts_per_tok", 1))
