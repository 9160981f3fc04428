"""Fuse this rank's rows of linear layers that transformers shards column-wise across ranks (`colwise`).

The weights are DTensors; in transformers 5.1 to 5.15, they are plain parameters with this rank's rows. Called one by
one, the layers run hooks or an instance forward, and end in a GEMM of local tensors. The fused weight shares the memory
of these local tensors, and one GEMM with it returns the same results as the layers. Row-wise layers, which need an
all-reduce, are called as modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm import ops
from hf_rocm.layers.grouped_linear import hooks_of
from hf_rocm.layers.weight_group import SLOT, Part, lock, register
from hf_rocm.weights.block_group import BlockGroup
from hf_rocm.weights.fused_storage import join_parameters, release_joined
from hf_rocm.weights.moves import waits_for_gpu
from hf_rocm.weights.tensor_parallel import is_sharded, local, refusal


@register
class Shards(BlockGroup):
    """A sharded group. weight: [N_1 + N_2 + …, K], this rank's rows of the layers; bias: [N_1 + …] or None."""

    order = 60

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: tuple[int, ...], parts: tuple[Part, ...]) -> None:
        self.weight, self.bias, self.sizes, self.parts = weight, bias, sizes, parts
        self.names = tuple(part.name for part in parts)

    @classmethod
    def names_for(cls, module: nn.Module, binding: Any) -> tuple[str, ...]:
        return tuple(binding.fuses) if binding.fuses and is_sharded(module, binding.fuses) else ()

    @classmethod
    def refusal(cls, module: nn.Module, names: tuple[str, ...]) -> str | None:
        return refusal(module, names)

    @classmethod
    def why_not(cls, module: nn.Module, names: tuple[str, ...]) -> str | None:
        reason = super().why_not(module, names)
        group = module.__dict__.get(SLOT)
        if reason is not None or not isinstance(group, Shards):
            return reason
        layers = [(part, part.layer(module)) for part in group.parts]
        same = all(
            hooks_of(layer) == part.hooks and layer.__dict__.get("forward") is part.forward for part, layer in layers
        )
        return None if same else cls.moved

    @classmethod
    def join(cls, module: nn.Module, names: tuple[str, ...]) -> None:
        linears: list[Any] = [module._modules[name] for name in names]
        weights = [_movable(linear._parameters["weight"]) for linear in linears]
        biases = [_movable(linear._parameters["bias"]) for linear in linears if linear._parameters["bias"] is not None]
        weight = join_parameters(weights)
        bias = join_parameters(biases) if biases else None
        parts = tuple(
            Part(
                owner=None,
                name=name,
                # The forward that transformers set, or None where it uses hooks.
                forward=linear.__dict__.get("forward"),
                hooks=hooks_of(linear),
                weight=own.data_ptr(),
                nbytes=own.nbytes,
                bias=biases[index].data_ptr() if biases else None,
            )
            for index, (name, linear, own) in enumerate(zip(names, linears, weights, strict=True))
        )
        module.__dict__[SLOT] = Shards(weight, bias, tuple(len(own) for own in weights), parts)
        release_joined(weight)

    @classmethod
    def restore(cls, module: nn.Module) -> None:
        """Move the parameters still in the group to their own memory. The other parameters were replaced or moved."""
        with lock:
            group = module.__dict__.pop(SLOT, None)
            if isinstance(group, Shards):
                group.leave(module, shared=True)

    @classmethod
    def resume(cls, module: nn.Module, names: tuple[str, ...]) -> None:
        linear: Any = module._modules[names[0]]
        if not waits_for_gpu(module, linear._parameters["weight"]):
            cls.form(module, names)

    def multiply(self, module: nn.Module, x: Tensor, norm: ops.Norm | None, activation: str | None) -> Tensor | None:
        """Return the group's output, or None if x is not a plain tensor or gradients of x are needed.

        x: replicated on all ranks.
        """
        if x.__class__ is not Tensor or (x.requires_grad and torch.is_grad_enabled()):
            return None
        if norm is None and activation is None:
            return ops.linear(x, self.weight, self.bias)
        return ops.fused_linear(x, self.weight, self.bias, norm=norm, activation=activation)

    def memory_of(self, parameter: Any) -> Tensor | None:
        return None if parameter is None else local(parameter)

    def __reduce__(self) -> tuple[object, ...]:
        # Copies of a sharded model run unfused.
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


def _movable(parameter: Any) -> Tensor:
    """Return this rank's part of a parameter. The part of a DTensor is first moved to the start of its storage.

    A DTensor keeps its initial storage offset, and compilers compare it with the offset of the local tensor.
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
