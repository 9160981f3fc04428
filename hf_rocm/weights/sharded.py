"""Linear layers that transformers shards over ranks by their outputs (`colwise`): this rank's rows, run as one.

The weights are DTensors; from 5.1 to 5.15 they are plain parameters, this rank's rows. Called one by one, each layer
goes through hooks or a forward that lead to a product of local tensors; the block is those tensors' own memory, and its
product is what the layers return. Row-wise layers, which exchange their sums, stay calls of their modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _get_tracing_state
from torch.nn.modules import module as torch_module

from hf_rocm.weights.block import capturing, held_elsewhere, join_parameters, own_memory
from hf_rocm.weights.colwise import hooks_of, local, refusal
from hf_rocm.weights.mapped import release_freed

# In the __dict__ of a module whose group of sharded layers lies in one block.
STATE = "_hf_rocm_shards"

# The names of such a group whose weights were replaced or moved since.
MOVED = "_hf_rocm_shards_moved"

_hooks_on_all = torch_module._global_forward_hooks
_pre_hooks_on_all = torch_module._global_forward_pre_hooks


class Part(NamedTuple):
    """What one layer must still look like for the block to stand for it."""

    name: str
    forward: object  # transformers', or None where it uses hooks
    hooks: tuple[object, ...]
    weight: int  # address of the local rows
    nbytes: int
    bias: int | None


class Shards:
    """A live block. weight: [N_1 + N_2 + …, K], this rank's rows of each; bias: [N_1 + …] or None; sizes: N_1, …"""

    kept = None  # no shuffled copy is made of it

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: tuple[int, ...], parts: tuple[Part, ...]) -> None:
        self.weight, self.bias, self.sizes, self.parts = weight, bias, sizes, parts

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts)

    def __reduce__(self) -> tuple[object, ...]:
        return type(None), ()  # copies of a sharded model run unfused

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


def fuse(module: nn.Module, names: tuple[str, ...]) -> str | None:
    """Fuse this rank's rows of these layers, in place. Returns None, also if they were fused, or why not."""
    held = live(module)
    if held is not None and held.names == names:
        return None
    reason = refusal(module, names)
    if reason is not None:
        return reason
    part(module)
    linears: list[Any] = [module._modules[name] for name in names]
    with torch.no_grad():
        weights = [_movable(linear._parameters["weight"]) for linear in linears]
        biases = [_movable(linear._parameters["bias"]) for linear in linears if linear._parameters["bias"] is not None]
        weight = join_parameters(weights)
        bias = join_parameters(biases) if biases else None
    module.__dict__[STATE] = Shards(
        weight,
        bias,
        tuple(len(each) for each in weights),
        tuple(
            Part(
                name,
                linear.__dict__.get("forward"),
                hooks_of(linear),
                own.data_ptr(),
                own.nbytes,
                biases[index].data_ptr() if biases else None,
            )
            for index, (name, linear, own) in enumerate(zip(names, linears, weights, strict=True))
        ),
    )
    if weight.is_cuda:
        torch.cuda.empty_cache()  # as for blocks that aren't sharded
    else:
        release_freed(weight.nbytes)
    return None


def live(module: nn.Module, *, forget: bool = True) -> Shards | None:
    """The block that stands for the module's layers at this moment, or None: then they must be called.

    forget: let go of a block whose weights have left it.
    """
    held: Shards | None = module.__dict__.get(STATE)
    if held is None or _hooks_on_all or _pre_hooks_on_all or _get_tracing_state() is not None:
        return None
    gradients = torch.is_grad_enabled()
    for name, forward, hooks, address, nbytes, bias_address in held.parts:
        linear: Any = module._modules.get(name)
        if linear.__class__ is not nn.Linear or linear.__dict__.get("forward") is not forward:
            return None
        its = linear.__dict__
        if (hooks or its["_forward_hooks"] or its["_forward_pre_hooks"]) and not _same(hooks_of(linear), hooks):
            return None
        weight, bias = its["_parameters"].get("weight"), its["_parameters"].get("bias")
        own = local(weight)
        if own is None or own.data_ptr() != address or own.nbytes != nbytes or not own.is_contiguous():
            return _forget(module) if forget else None
        if gradients and weight.requires_grad:
            return None
        if (bias is None) is not (bias_address is None):
            return _forget(module) if forget else None
        if bias is not None:
            if local(bias).data_ptr() != bias_address:
                return _forget(module) if forget else None
            if gradients and bias.requires_grad:
                return None
    return held


def part(module: nn.Module, *, shared: bool = True) -> None:
    """Give rows that lie in the block ordinary memory of their own again; parameters, values and objects stay.

    What lies elsewhere meanwhile is someone else's. shared: also rows that another tensor holds.
    """
    held = module.__dict__.pop(STATE, None)
    module.__dict__.pop(MOVED, None)
    for each in held.parts if isinstance(held, Shards) else ():
        linear: Any = module._modules.get(each.name)
        for label, address in (("weight", each.weight), ("bias", each.bias)) if linear is not None else ():
            parameter = linear._parameters.get(label)
            own = None if parameter is None else local(parameter)
            if own is not None and own.data_ptr() == address and (shared or not held_elsewhere(own)):
                own_memory(own)


def take_out(module: nn.Module) -> tuple[str, ...] | None:
    """Drop the block before its weights are moved. Returns the names to fuse again, None if they had left it."""
    held = module.__dict__.pop(STATE, None)
    if not isinstance(held, Shards):
        return None
    for each in held.parts:
        linear: Any = module._modules.get(each.name)
        weight = None if linear is None else linear._parameters.get("weight")
        if weight is None or local(weight).data_ptr() != each.weight:
            module.__dict__[MOVED] = held.names
            return None
    return held.names


def why_not(module: nn.Module, names: Sequence[str]) -> str | None:
    """Why this group's next call would not run fused; None if it would. Changes nothing."""
    reason = refusal(module, names)
    if reason is not None:
        return reason
    if MOVED in module.__dict__:
        return _MOVED
    held = module.__dict__.get(STATE)
    if held is None:
        return "it was not prepared"
    if _hooks_on_all or _pre_hooks_on_all:
        return "forward hooks are registered on all modules"
    if torch.is_grad_enabled() and any(_requires_grad(module._modules[name]) for name in names):
        return "gradients are on and the weights require them: call the model under no_grad() or inference_mode()"
    return None if live(module, forget=False) is not None else _MOVED


_MOVED = "the weights were replaced or moved after fusing; hf_rocm.prepare(model) fuses them again"


def _requires_grad(linear: Any) -> bool:
    return any(parameter.requires_grad for parameter in linear.parameters())


def _movable(parameter: Any) -> Tensor:
    """This rank's part, at the start of its storage: a DTensor keeps the offset that it found.

    Compilers compare the two.
    """
    own = local(parameter)
    if own is parameter or not parameter.storage_offset():
        return own
    moved = type(parameter).from_local(
        own.clone(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    parameter.data, parameter._local_tensor = moved, moved._local_tensor
    return local(parameter)


def _same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    return len(one) == len(other) and all(mine is its for mine, its in zip(one, other, strict=True))


def _forget(module: nn.Module) -> Shards | None:
    """Let go of the block, and with it of its memory. Returns None."""
    held: Shards | None = module.__dict__.get(STATE)
    if held is not None and not capturing():
        part(module, shared=False)
        module.__dict__[MOVED] = held.names
    return None
