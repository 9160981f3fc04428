"""The gated MLP: down(act(gate(x)) · up(x))."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from hf_rocm import ops
from hf_rocm.layers.branch import Branch, by_stock, rides_along
from hf_rocm.weights import fuse

# What transformers' ACT2FN builds, by class: 4.x uses torch's own SiLU, 5.x wraps it, GELUTanh was renamed once.
_ACTIVATIONS = {
    ("torch.nn.modules.activation", "SiLU"): "silu",
    ("transformers.activations", "SiLUActivation"): "silu",
    ("transformers.activations", "GELUActivation"): "gelu",
    ("transformers.activations", "PytorchGELUTanh"): "gelu_tanh",
    ("transformers.activations", "GELUTanh"): "gelu_tanh",
}


def gated_mlp(
    module: Any, stock: Callable[..., Any], x: Tensor | Branch, *, activation: str = "act_fn", down: str = "down_proj"
) -> Tensor:
    """For a gate and an up projection, which the loader fuses in this order, and a down projection.

    x: [..., hidden], or what a decoder layer hands on. activation: the name of the child that activates; where the
    model calls a function instead, the name that `ops.act_and_mul` knows. down: the name of the child that projects
    down. Returns [..., hidden]. Without fused weights the stock forward runs.
    """
    if isinstance(x, Branch):
        return _branch_of_mlp(module, stock, x, activation, down)
    if rides_along(x):
        return _branch_of_mlp(module, partial(by_stock, stock), Branch(x, None, None), activation, down)
    joined = fuse.product(module, x)  # [..., gate | up]
    if joined is None:
        result: Tensor = stock(module, x)
        return result
    function = module._modules.get(activation)
    product = ops.act_and_mul(joined, activation=activation) if function is None else activated(joined, function)
    output: Tensor = module._modules[down](product)
    return output


def _branch_of_mlp(module: Any, stock: Callable[..., Any], x: Branch, activation: str, down: str) -> Tensor:
    function = module._modules.get(activation)
    known = activation if function is None else activation_of(function)
    product = fuse.product(module, x.x, norm=x.norm, activation=known)
    if product is None:
        result: Tensor = stock(module, x)
        return result
    if known is None:
        product = activated(product, function)
    return x.last_product(module._modules[down], product)


def joined_mlp(module: Any, x: Tensor, *, activation: str = "activation_fn") -> Tensor:
    """For checkpoints with gate and up in one matrix, `gate_up_proj`. x: [..., hidden]. Returns [..., hidden]."""
    down: Tensor = module.down_proj(activated(module.gate_up_proj(x), module._modules[activation]))
    return down


def activated(joined: Tensor, function: Any) -> Tensor:
    """act(gate) · up of joined: [..., gate | up]. function: the activation, which runs itself if it isn't known."""
    known = activation_of(function)
    if known is None:
        gate, up = joined.chunk(2, dim=-1)
        product: Tensor = function(gate) * up
        return product
    return ops.act_and_mul(joined, activation=known)


def activation_of(function: object) -> str | None:
    """The name that `ops.act_and_mul` knows this activation module by, or None if it must be called as it is."""
    kind = type(function)
    name = _ACTIVATIONS.get((kind.__module__, kind.__qualname__))
    if name is None or not isinstance(function, nn.Module):
        return None
    if function._forward_hooks or function._forward_pre_hooks or "forward" in function.__dict__:
        return None
    if inspect.ismethod(getattr(function, "act", None)):
        return None  # the variant in Python was asked for
    return name
