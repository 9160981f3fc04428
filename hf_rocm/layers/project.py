"""Linear layers that read the same input: one product where the loader fused them, one each where not."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_rocm.layers.branch import Branch
from hf_rocm.weights import fuse


def project(module: nn.Module, x: Tensor | Branch, *names: str, head_dim: int | None = None) -> tuple[Tensor, ...]:
    """The outputs of the named linear children of module, in order.

    x: [..., K], or what a decoder layer hands on. Returns a [..., N_i] for each name; parts of one tensor when the
    fused weights ran. head_dim: of heads, which makes it [B, S, K] and a [B, N_i / head_dim, S, head_dim] each.
    """
    if isinstance(x, Branch):
        parts = fuse.project(module, x.x, norm=x.norm, head_dim=head_dim)
        x = x.normed() if parts is None else x.x
    else:
        parts = fuse.project(module, x, head_dim=head_dim)
    if parts is not None:
        return parts
    parts = tuple(module._modules[name](x) for name in names)  # type: ignore[misc]
    return parts if head_dim is None else split_heads(parts, head_dim)


def split_heads(parts: tuple[Tensor, ...], head_dim: int) -> tuple[Tensor, ...]:
    """[B, S, heads · D] each. Returns [B, heads, S, D] each, views."""
    shape = (*parts[0].shape[:-1], -1, head_dim)
    return tuple(part.view(shape).transpose(1, 2) for part in parts)


def project_out(module: Any, hidden_states: Tensor | Branch, output: Tensor, name: str = "o_proj") -> Tensor:
    """The last product of an attention layer. hidden_states: what the layer was called with; output: [B, S, H · D]."""
    linear = module._modules[name]
    if isinstance(hidden_states, Branch):
        return hidden_states.last_product(linear, output)
    result: Tensor = linear(output)
    return result
