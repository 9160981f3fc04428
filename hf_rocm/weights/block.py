"""The block: one allocation for the weights of a group, each parameter with a storage of its own over its part.

The parts come through DLPack, so what looks at parameters or storages (state dicts, safetensors, pickle, optimizers)
sees ordinary tensors that share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from hf_rocm.weights.eligible import refusal
from hf_rocm.weights.kept import Kept
from hf_rocm.weights.mapped import give_back, release_freed


class Part(NamedTuple):
    """What one linear layer must still look like for the block to stand for it."""

    name: str
    forward: object  # an instance forward that was found harmless, or None
    weight: int  # address
    nbytes: int  # of the weight
    bias: int | None  # address


class Fused:
    """A live block of a module. weight: [N_1 + N_2 + …, K]; bias: [N_1 + …] or None; sizes: N_1, N_2, …"""

    def __init__(
        self, module: nn.Module, weight: Tensor, bias: Tensor | None, sizes: tuple[int, ...], parts: tuple[Part, ...]
    ) -> None:
        self.module = ref(module)
        self.weight = weight
        self.bias = bias
        self.sizes = sizes
        self.parts = parts
        self.kept: Kept | None = None  # a shuffled copy, see preshuffle.py

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts)

    def __reduce__(self) -> tuple[object, ...]:
        # A pickle carries the names alone, as builtins, which a process without hf_rocm can read too.
        return (tuple, (self.names,))

    def __deepcopy__(self, memo: dict[int, Any]) -> object:
        # A module's children are copied before what was added to it later. Fused here, a copy that only ever runs
        # compiled is fused too; else its first call does it.
        module = self.module()
        twin = None if module is None else memo.get(id(module))
        if module is None or twin is None or not intact(module, self):
            return self.names
        linears = {name: memo.get(id(module._modules[name])) for name in self.names}
        copies: Any = SimpleNamespace(_modules=linears)
        if None in linears.values() or refusal(copies, self.names) is not None:
            return self.names
        return _join_children(twin, linears)


# Live blocks by the address of their first weight: an op of a compiled graph has the weights, not the module.
_blocks: WeakValueDictionary[int, Fused] = WeakValueDictionary()


def join(module: nn.Module, names: tuple[str, ...]) -> Fused:
    """Move the weights (and biases) of these children into one block each. They must be eligible."""
    others = [child for name, child in module._modules.items() if type(child) is nn.Linear and name not in names]
    beside = [linear._parameters["weight"] for linear in others]
    return _join_children(module, {name: module._modules[name] for name in names}, beside)


def _join_children(module: nn.Module, children: dict[str, Any], beside: Sequence[Any] = ()) -> Fused:
    names, linears = tuple(children), list(children.values())
    weights = [linear._parameters["weight"] for linear in linears]
    biases = [linear._parameters["bias"] for linear in linears]
    weight = join_parameters(weights, beside)
    bias = None if biases[0] is None else join_parameters(biases)
    parts = tuple(
        Part(
            name,
            linear.__dict__.get("forward"),
            own_weight.data_ptr(),
            own_weight.nbytes,
            None if own_bias is None else own_bias.data_ptr(),
        )
        for name, linear, own_weight, own_bias in zip(names, linears, weights, biases, strict=True)
    )
    held = Fused(module, weight, bias, tuple(len(own) for own in weights), parts)
    _blocks[parts[0].weight] = held
    if weight.is_cuda:
        # The freed weights are too small for the next block: kept by the allocator, they would add up to a second
        # model.
        torch.cuda.empty_cache()
    else:
        release_freed(weight.nbytes)
    return held


def block_of(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Fused | None:
    """The live block that consists of exactly these weights and biases at this moment, or None."""
    held = _blocks.get(weights[0].data_ptr())
    if held is None or held.weight.dtype != weights[0].dtype or held.weight.device != weights[0].device:
        return None
    if len(weights) != len(held.parts) or len(biases) != (0 if held.bias is None else len(held.parts)):
        return None
    for part, weight in zip(held.parts, weights, strict=True):
        if weight.data_ptr() != part.weight or weight.nbytes != part.nbytes or not weight.is_contiguous():
            return None
    for part, bias in zip(held.parts, biases, strict=False):
        if bias.data_ptr() != part.bias or not bias.is_contiguous():
            return None
    return held


def intact(module: nn.Module, held: Fused) -> bool:
    """Whether the parameters are still parts of the block, whatever else keeps it from running."""
    linears: list[Any] = [module._modules.get(name) for name in held.names]
    if not all(type(linear) is nn.Linear for linear in linears):
        return False
    weights = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return all(type(tensor) is nn.Parameter for tensor in [*weights, *biases]) and block_of(weights, biases) is held


def capturing() -> bool:
    """Whether a graph is being recorded: no weight may move meanwhile."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def held_elsewhere(parameter: Tensor) -> bool:
    """Whether another tensor lies in its storage: one that wouldn't follow if the parameter moved."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    own = 2  # the parameter, and the storage that is being asked
    return count is not None and bool(count(parameter.untyped_storage()._cdata) > own)


def part_memory(module: nn.Module, names: Sequence[str]) -> None:
    """Give the weights (and biases) of these children ordinary memory of their own; values and objects stay."""
    on_gpu, freed = False, 0
    for linear in (module._modules.get(name) for name in names):
        for parameter in () if linear is None else (linear._parameters.get(key) for key in ("weight", "bias")):
            if type(parameter) is nn.Parameter and not parameter.is_meta:
                own_memory(parameter)
                on_gpu, freed = on_gpu or parameter.is_cuda, freed + parameter.nbytes
    if on_gpu:
        torch.cuda.empty_cache()
    else:
        release_freed(freed)


def own_memory(parameter: Tensor) -> None:
    """Copy its values to ordinary memory that is its alone; the object stays."""
    with torch.no_grad(), torch.inference_mode(parameter.is_inference()):
        parameter.data = parameter.data.clone()


def join_parameters(parameters: Sequence[Any], beside: Sequence[Any] = ()) -> Tensor:
    """Move these parameters, [N_i, …] each, into one block [N_1 + N_2 + …, …], which is returned.

    beside: parameters that may lie between them, and may be moved.
    """
    # A parameter made under inference_mode takes only such tensors, an ordinary one none of them.
    with torch.no_grad(), torch.inference_mode(parameters[0].is_inference()):
        others = _step_aside(parameters, beside)
        block = torch.cat([parameter.data for parameter in parameters])
        row = 0
        for parameter in parameters:
            rows, old = len(parameter), parameter.data
            parameter.data = _apart(block[row : row + rows])
            give_back(old)
            row += rows
        for other in others:
            own_memory(other)
    return block


def _apart(part: Tensor) -> Tensor:
    """The same memory as a tensor with a storage of its own; PyTorch exports it from the current device alone."""
    with torch.cuda.device_of(part):
        return from_dlpack(part)


_LARGE = 2**20  # smaller tensors have memory apart, in the allocator of PyTorch
_STEP = 512  # what it rounds to


def _step_aside(parameters: Sequence[Any], beside: Sequence[Any]) -> list[Any]:
    """Empty the stretch of GPU memory that these fill, with what lies between them, so that the block fits there.

    transformers loads into one allocation of a model's size, which can't be given back in pieces: blocks beside it
    would leave as much of it unused. For a moment all lie in a copy. Returns the others that do.
    """
    first = parameters[0]
    if not _on_gpu(first) or first.nbytes < _LARGE:
        return []
    low, high = (end(each.data_ptr() for each in parameters) for end in (min, max))
    others = [each for each in beside if _may_move(each, first) and low < each.data_ptr() < high]
    run = sorted([*parameters, *others], key=lambda each: int(each.data_ptr()))
    for one, following in pairwise(run):
        if one.data_ptr() + -(-one.nbytes // _STEP) * _STEP != following.data_ptr():
            return []
    copy = torch.cat([each.data.reshape(-1) for each in run])
    for each, part in zip(run, copy.split([each.numel() for each in run]), strict=True):
        each.data = _apart(part).view(each.shape)
    torch.cuda.empty_cache()
    return others


def _may_move(parameter: Any, like: Tensor) -> bool:
    """Whether nothing but the parameter itself would notice."""
    return (
        type(parameter) is nn.Parameter
        and hasattr(torch._C, "_storage_Use_Count")
        and (parameter.device, parameter.dtype, parameter.is_inference())
        == (like.device, like.dtype, like.is_inference())
        and parameter.is_contiguous()
        and parameter.untyped_storage().nbytes() == parameter.nbytes
        and not held_elsewhere(parameter)
    )


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda
