"""The gated MLP: down(act(gate(x)) · up(x))."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hf_rocm import ops
from hf_rocm.weights import fuse

# What transformers' ACT2FN builds, by class: 4.x uses torch's own SiLU, 5.x wraps it, GELUTanh was renamed once.
_ACTIVATIONS = {
    ("torch.nn.modules.activation", "SiLU"): "silu",
    ("transformers.activations", "SiLUActivation"): "silu",
    ("transformers.activations", "GELUActivation"): "gelu",
    ("transformers.activations", "PytorchGELUTanh"): "gelu_tanh",
    ("transformers.activations", "GELUTanh"): "gelu_tanh",
}


def gated_mlp(module: Any, stock: Callable[..., Any], x: Tensor) -> Tensor:
    """x: [..., hidden]. Returns [..., hidden]. Without fused weights the stock forward runs."""
    joined = fuse.product(module, x)  # [..., gate | up]
    if joined is None:
        result: Tensor = stock(module, x)
        return result
    activation = activation_of(module.act_fn)
    if activation is None:  # an unknown activation, or one that the user touched: what is there runs
        gate, up = joined.chunk(2, dim=-1)
        hidden = module.act_fn(gate) * up
    else:
        hidden = ops.act_and_mul(joined, activation=activation)
    down: Tensor = module.down_proj(hidden)
    return down


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
