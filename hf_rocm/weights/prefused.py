"""Recognise layers that the checkpoint already stores as one matrix, so that they need no fusing."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.linear import Linear

# The names of layers that fuse q, k and v, or gate and up.
_NAMES = ("qkv_proj", "query_key_value", "c_attn", "qkv", "Wqkv", "wqkv", "W_pack", "gate_up_proj", "Wi")

# GPT-2's linear layer, whose weight is transposed.
_CONV1D = ("transformers.pytorch_utils", "Conv1D")


def fused_in_checkpoint(module: nn.Module) -> list[str]:
    """Return the names of the children that are already fused."""
    return [name for name in _NAMES if _multiplies(module._modules.get(name))]


def _multiplies(child: nn.Module | None) -> bool:
    kind = type(child)
    return isinstance(child, Linear) or (kind.__module__, kind.__qualname__) == _CONV1D
