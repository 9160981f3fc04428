"""Linear layers that read the same input: one product where the loader fused them, one each where not."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_rocm.layers.branch import Branch
from hf_rocm.weights import fuse


def project(module: nn.Module, x: Tensor | Branch, *names: str) -> tuple[Tensor, ...]:
    """The outputs of the named linear children of module, in order.

    x: [..., K], or what a decoder layer hands on. Returns a [..., N_i] for each name; parts of one tensor when the
    fused weights ran.
    """
    if isinstance(x, Branch):
        parts = fuse.project(module, x.x, norm=x.norm)
        x = x.normed() if parts is None else x.x
    else:
        parts = fuse.project(module, x)
    if parts is not None:
        return parts
    return tuple(module._modules[name](x) for name in names)  # type: ignore[misc]


def project_out(module: Any, hidden_states: Tensor | Branch, output: Tensor, name: str = "o_proj") -> Tensor:
    """The last product of an attention layer. hidden_states: what the layer was called with; output: [B, S, H · D]."""
    linear = module._modules[name]
    if isinstance(hidden_states, Branch):
        return hidden_states.last_product(linear, output)
    result: Tensor = linear(output)
    return result
