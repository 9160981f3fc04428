"""Rotary embedding modules: one kernel computes cos and sin of all positions; stock launches about nine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, compiler

from hf_rocm import features, ops
from hf_rocm.layers.fallback_reasons import note
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.linear import left_to_pytorch
from hf_rocm.ops.rotary_angles import HALVES, one_kernel

# The code of transformers that updates the frequencies of some types of rotary embedding before the forward.
_FEATURE = "rotary_embedding"


@dataclass(frozen=True)
class RotaryEmbedding:
    """A module with the buffer `inv_freq` [R / 2] and the number `attention_scaling`, or one of each per type of layer.

    layout: see `ops.rotary_angles`. wide: whether cos and sin are returned in fp32, not in the dtype of x.
    """

    layout: str = HALVES
    wide: bool = False

    def forward(
        self,
        module: Any,
        stock: Callable[..., Any],
        x: Tensor,
        position_ids: Tensor | None = None,
        layer_type: str | None = None,
    ) -> Any:
        """Return (cos, sin), [B, S, R], or [B, S, R / 2] for the layout `once`.

        x: any tensor on the result's device; unless `wide`, the result has its dtype. position_ids: [B, S]. Runs the
        stock forward while torch.compile or torch.export traces, if no kernel serves the call, or if the frequencies
        may change during a call.
        """
        dtype = torch.float32 if self.wide else x.dtype
        if position_ids is not None and not (compiling() or compiler._is_compiling_flag):
            reason = changes_frequencies(module, layer_type)
            note(module, reason)
            parts = None if reason else frequencies(module, layer_type)
            if parts is not None and _is_plain(parts[0], position_ids, x):
                inv_freq, scaling = parts
                if one_kernel(inv_freq, position_ids, dtype=dtype, layout=self.layout):
                    return ops.rotary_angles(inv_freq, position_ids, dtype=dtype, scaling=scaling, layout=self.layout)
        arguments = [x, position_ids, layer_type]
        while arguments[-1] is None:
            arguments.pop()
        return stock(module, *arguments)


def frequencies(module: Any, layer_type: str | None = None) -> tuple[Tensor, float] | None:
    """Return `inv_freq` [R / 2] and the factor of cos and sin, or None if they are not a plain tensor and a number."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    inv_freq, scaling = getattr(module, f"{prefix}inv_freq", None), getattr(module, f"{prefix}attention_scaling", None)
    if type(inv_freq) is not Tensor or inv_freq.ndim != 1 or not isinstance(scaling, (int, float)):
        return None
    return inv_freq, scaling


def changes_frequencies(module: Any, layer_type: str | None = None) -> str | None:
    """Return why a call may change the frequencies first, as with the types `dynamic` and `longrope`, or None."""
    kind = getattr(module, "rope_type", None)
    if layer_type is not None and isinstance(kind, dict):
        kind = kind.get(layer_type)
    if not isinstance(kind, str):
        return f"the type of its rotary embedding is unknown: {kind!r}"
    if "dynamic" in kind or kind == "longrope":
        return f"its rotary embedding of type {kind} depends on the length of the call"
    return features.refuses(_FEATURE)


def _is_plain(inv_freq: Tensor, position_ids: Tensor, x: Tensor) -> bool:
    if type(position_ids) is not Tensor or position_ids.ndim != 2 or inv_freq.requires_grad:
        return False
    return inv_freq.device == position_ids.device == x.device and not left_to_pytorch(position_ids)
