"""Rotary embeddings as specifications of operations: the angles, and the rotations in attention modules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import nn

from hf_rocm.layers.rotary import RotaryEmbedding, changes_frequencies, frequencies
from hf_rocm.ops.specs.pointwise import RopeSpec, RotaryAnglesSpec
from hf_rocm.overlay import bind
from hf_rocm.tools.attention_specifications import heads_of

# The functions of `hf_rocm.layers` that rotate queries and keys.
_ROTATING = frozenset(("attend", "rotate"))


def rotated_dims(model: nn.Module) -> dict[str, set[int]]:
    """Map the path of every module that contains a rotary embedding to the numbers of dims that are rotated."""
    dims: dict[str, set[int]] = {}
    tables = {path for path, module in model.named_modules() if isinstance(module, nn.ModuleDict)}
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        # Skip a ModuleDict of rotary embeddings, one per type of layer.
        while parent in tables:
            parent = parent.rpartition(".")[0]
        for name, buffer in module._buffers.items():
            if name.endswith("inv_freq") and not name.startswith("original_") and buffer is not None:
                dims.setdefault(parent, set()).add(2 * len(buffer))
    return dims


def of_angles(module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Yield (operation, situation, specification) tuples of a rotary embedding. dtype: that of the hidden states."""
    layer = getattr(bind.binding_of(module), "layer", None)
    if not isinstance(layer, RotaryEmbedding) or bind.mode_of(module) == bind.OFF:
        return
    kinds = getattr(module, "rope_type", None)
    for layer_type in kinds if isinstance(kinds, dict) else (None,):
        parts = None if changes_frequencies(module, layer_type) else frequencies(module, layer_type)
        if parts is not None:
            inv_freq = parts[0]
            result = torch.float32 if layer.wide else dtype
            spec = RotaryAnglesSpec(
                result, inv_freq.dtype, torch.int64, inv_freq.device, len(inv_freq), layer.layout, False
            )
            yield "rotary_angles", f"{len(inv_freq)} frequencies, {layer.layout}", tuple(spec)


def of_rotation(
    module: nn.Module, path: str, dims: dict[str, set[int]], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Yield the (operation, situation, specification) tuples of an attention module that rotates with `ops.rope`.

    Other modules have none. path: the module's path in the model. dims: the result of `rotated_dims`.
    """
    binding = bind.binding_of(module)
    shape = heads_of(module)
    if binding is None or shape is None or not _rotates(getattr(binding.replacement, "__code__", None)):
        return
    if getattr(getattr(module, "config", None), "rope_interleave", False):
        # The model's own function rotates pairs of neighbouring dims.
        return
    while path and path not in dims:
        path = path.rpartition(".")[0]
    # latent attention rotates a part of each head
    head_dim = getattr(module, "qk_rope_head_dim", None) or shape.head_dim
    for rotated in sorted(dims.get(path, ())):
        if rotated <= head_dim:
            part = f"dim {head_dim}" if rotated == head_dim else f"{rotated} of dim {head_dim}"
            spec = RopeSpec(dtype, dtype, device, head_dim, rotated, interleaved=False, shared=True, grad=False)
            yield "rope", part, tuple(spec)


@cache
def _rotates(code: CodeType | None) -> bool:
    """Return whether a forward, or a function in it, calls one of the functions that rotate with `ops.rope`.

    Forwards that pass `once` don't count, since the model's own function may run instead.
    """
    if code is None or any(isinstance(constant, tuple) and "once" in constant for constant in code.co_consts):
        return False
    inside = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return not _ROTATING.isdisjoint(code.co_names) or any(map(_rotates, inside))
