"""The block: one allocation for the weights of a group, each parameter with a storage of its own over its part.

The parts come through DLPack, so what looks at parameters or storages (state dicts, safetensors, pickle, optimizers)
sees ordinary tensors that share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack


class Part(NamedTuple):
    """What one linear layer must still look like for the block to stand for it."""

    name: str
    forward: object  # an instance forward that was found harmless, or None
    weight: int  # address
    nbytes: int  # of the weight
    bias: int | None  # address


class Fused:
    """A live block. weight: [N_1 + N_2 + …, K]; bias: [N_1 + …] or None; sizes: N_1, N_2, …"""

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: tuple[int, ...], parts: tuple[Part, ...]) -> None:
        self.weight = weight
        self.bias = bias
        self.sizes = sizes
        self.parts = parts

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts)

    def __reduce__(self) -> tuple[object, ...]:
        # Copies and pickles carry the names alone, as builtins, which a process without hf_rocm can read too.
        return (tuple, (self.names,))


# Live blocks by the address of their first weight: an op of a compiled graph has the weights, not the module.
_blocks: WeakValueDictionary[int, Fused] = WeakValueDictionary()


def join(module: nn.Module, names: tuple[str, ...]) -> Fused:
    """Move the weights (and biases) of these children into one block each. They must be eligible."""
    linears: list[Any] = [module._modules[name] for name in names]
    weights = [linear._parameters["weight"] for linear in linears]
    biases = [linear._parameters["bias"] for linear in linears]
    weight = _join(weights)
    bias = None if biases[0] is None else _join(biases)
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
    held = Fused(weight, bias, tuple(len(own) for own in weights), parts)
    _blocks[parts[0].weight] = held
    if weight.is_cuda:
        # The freed weights are too small for the next block: kept by the allocator, they would add up to a second
        # model.
        torch.cuda.empty_cache()
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


def part_memory(module: nn.Module, names: Sequence[str]) -> None:
    """Give the weights (and biases) of these children ordinary memory of their own; values and objects stay."""
    on_gpu = False
    for linear in (module._modules.get(name) for name in names):
        for parameter in () if linear is None else (linear._parameters.get(key) for key in ("weight", "bias")):
            if type(parameter) is nn.Parameter and not parameter.is_meta:
                with torch.no_grad(), torch.inference_mode(parameter.is_inference()):
                    parameter.data = parameter.data.clone()
                on_gpu = on_gpu or parameter.is_cuda
    if on_gpu:
        torch.cuda.empty_cache()


def _join(parameters: Sequence[Any]) -> Tensor:
    # A parameter made under inference_mode takes only such tensors, an ordinary one none of them.
    with torch.no_grad(), torch.inference_mode(parameters[0].is_inference()):
        block = torch.cat([parameter.data for parameter in parameters])
        row = 0
        for parameter in parameters:
            rows = len(parameter)
            parameter.data = from_dlpack(block[row : row + rows])
            row += rows
    return block
