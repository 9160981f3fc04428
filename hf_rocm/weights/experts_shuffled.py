"""Shuffled copies of a mixture's experts, for aiter's `fused_moe`, which reads no other order.

They double the memory of the experts, so there are none unless the user grants it. What `kept.py` says of going stale
holds for them as well: they are compared with the weights at every use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm.ops.moe_shuffled import aiter_refuses
from hf_rocm.ops.shuffled import Shuffled
from hf_rocm.overlay import bind
from hf_rocm.weights.experts import Stacked, stacked
from hf_rocm.weights.kept import Kept

# In the module's __dict__: two `Kept`, of gate_up and of down; of a copy or an unpickled module two booleans.
KEPT = "_hf_rocm_experts_kept"

_NAMES = ("gate_up_proj", "down_proj")


def is_mixture(module: nn.Module) -> bool:
    """Whether this module's experts run through ours as one block, a list that was stacked or stacked parameters."""
    binding = bind.binding_of(module)
    return binding is not None and (bool(binding.experts) or _parameters(module) is not None)


def shuffle(module: nn.Module, left: int) -> tuple[str | None, int]:
    """Keep shuffled copies of the experts of a module without any: (why not, bytes). left: how many bytes are free."""
    with torch.no_grad():
        found = _blocks(module)
    if found is None:
        return "its experts are not stacked, or not as [gate | up] without biases", 0
    (gate_up, down), parameters = found
    if any(parameter.is_inference() for group in parameters for parameter in group):
        return "it was made under inference_mode, so writes to it aren't counted", 0
    reason = aiter_refuses(gate_up, down, _top(module))
    if reason is not None:
        return reason, 0
    nbytes = gate_up.nbytes + down.nbytes
    if nbytes > left:
        return f"a copy takes {nbytes} bytes, and {left} of the budget are left", 0
    copies = (Kept(block.flatten(0, 1), group, 0) for block, group in zip((gate_up, down), parameters, strict=True))
    module.__dict__[KEPT] = tuple(copies)
    return None, nbytes


def unshuffle(module: nn.Module) -> None:
    """Give the memory of the copies back."""
    for kept in module.__dict__.pop(KEPT, ()):
        if isinstance(kept, Kept):
            kept.drop()


def shuffled(module: nn.Module, x: Tensor) -> tuple[Shuffled, Shuffled] | None:
    """The copies as the weights are now, [E, 2I, H] and [E, H, I], or None. x: [T, H], what they are for."""
    if KEPT not in module.__dict__:
        return None
    found = _blocks(module)
    if found is None:
        return None
    pair = []
    for kept, block, group in zip(module.__dict__[KEPT], *found, strict=True):
        copy = kept.serves(x, group) if isinstance(kept, Kept) else None
        if copy is None:
            return None
        pair.append(Shuffled(copy.data.view(block.shape)))
    return pair[0], pair[1]


def _blocks(module: nn.Module) -> tuple[tuple[Tensor, Tensor], tuple[list[Tensor], list[Tensor]]] | None:
    """gate_up [E, 2I, H] and down [E, H, I], and the parameters that they consist of."""
    held = stacked(module)
    if isinstance(held, Stacked):
        if held.gate_up_bias is not None:
            return None
        of_expert = [held.parameters[place : place + 3] for place in range(0, len(held.parameters), 3)]
        pairs = [each for gate, up, _ in of_expert for each in (gate, up)]
        return (held.gate_up, held.down), (pairs, [each for _, _, each in of_expert])
    parameters = _parameters(module)
    if parameters is None:
        return None
    gate_up, down = parameters
    return (gate_up, down), ([gate_up], [down])


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
