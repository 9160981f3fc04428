"""The fused GEMM in a compiled graph: an op that looks up the block when it runs.

Addresses can't be compared while a graph is traced, and the graph must not be retraced when weights move. So the graph
references only the parameters. The op checks at run time whether they form a live block. If they don't, it computes one
GEMM per weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import Linear

from hf_rocm import ops
from hf_rocm.layers.weight_group import WeightGroup
from hf_rocm.ops.linear import exporting
from hf_rocm.weights.fused_storage import block_of

# An op that is defined by Library.define costs 3 µs per call; torch.library.custom_op would cost 10 µs.
_library = torch.library.Library("hf_rocm", "FRAGMENT")
_library.define("linear_group(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor")


def fused_output(module: nn.Module, x: Tensor, group: WeightGroup) -> Tensor | None:
    """Return the output of a fused group, computed by the op, while torch.compile traces; None if the op can't be used.

    The op is not used under torch.export, because exported programs must not depend on hf_rocm. Nor is it used under
    autocast, for gradients, or for layers that are not plain (another class, a hook or an instance forward).
    """
    if exporting() or torch.is_autocast_enabled(x.device.type):
        return None
    gradients = torch.is_grad_enabled()
    if gradients and x.requires_grad:
        return None
    weights, biases = [], []
    for part in group.parts:
        linear: Any = module._modules.get(part.name)
        if type(linear) is not Linear or len(linear._forward_hooks) or len(linear._forward_pre_hooks):
            return None
        # This forward may be harmless, but objects can't be compared while tracing.
        if "forward" in linear.__dict__:
            return None
        weight, bias = linear.weight, linear.bias
        if gradients and weight.requires_grad:
            return None
        if type(weight) is not nn.Parameter or (bias is None) is not (group.bias is None):
            return None
        weights.append(weight)
        if bias is not None:
            if gradients and bias.requires_grad:
                return None
            biases.append(bias)
    joined: Tensor = torch.ops.hf_rocm.linear_group(x, weights, biases)
    return joined


def _linear_group(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    group = block_of(weights, biases)
    if group is not None:
        joined: Tensor = group.gemm(x, weights)
        return joined
    outputs = [ops.linear(x, weight, biases[index] if biases else None) for index, weight in enumerate(weights)]
    return torch.cat(outputs, dim=-1)


def _shape_of_linear_group(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(weight.shape[0] for weight in weights)))


_library.impl("linear_group", _linear_group, "CompositeExplicitAutograd")
torch.library.register_fake("hf_rocm::linear_group", _shape_of_linear_group, lib=_library)
