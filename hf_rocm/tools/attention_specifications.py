"""The calls of an attention module, as specifications of operations.

The number of heads is not stored in one place: transformers' classes have separate or fused projections, and store the
numbers on the module or only in its config.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.linear import Linear

from hf_rocm.ops.mask_patterns import packed_specification, packing_serves
from hf_rocm.ops.specs.attention import AttentionSpec
from hf_rocm.overlay import bind
from hf_rocm.weights import quantized
from hf_rocm.weights.tensor_parallel import local


class Heads(NamedTuple):
    """The heads of an attention module on this rank."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim} and {self.value_dim}"
        return f"{self.heads} query heads, {self.kv_heads} key/value heads, dim {dims}"


def of_attention(
    module: nn.Module, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Yield an attention module's (operation, situation, specification) tuples, and none for other modules."""
    shape = heads_of(module)
    if shape is None:
        return
    causal = bool(getattr(module, "is_causal", getattr(module, "is_decoder", hasattr(module, "layer_idx"))))
    bias = dtype if _adds_bias(module) else None
    softcap, sinks = _softcap(module), getattr(module, "sinks", None) is not None
    packed = packed_specification(dtype, device, *shape, causal=causal, softcap=softcap)
    if bias is None and not sinks and packing_serves(packed):
        padding = "left-padded batch" if causal else "padded batch"
        yield "varlen_attention", f"{padding}, packed, {shape}", tuple(packed)
    situations = {"prefill": (False, True, causal, bias), "padded batch": (False, True, False, bias or torch.bool)}
    if causal:
        situations["decode"] = (True, False, False, bias)
    for situation, (one_query, square, is_causal, mask) in situations.items():
        spec = AttentionSpec(
            dtype=dtype,
            device=device,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            one_query=one_query,
            square=square,
            more_queries=False,
            causal=is_causal,
            window=None,
            softcap=softcap,
            sinks=sinks,
            mask=mask,
            grad=False,
            weights=False,
        )
        yield "attention", f"{situation}, {shape}", tuple(spec)


def heads_of(module: nn.Module) -> Heads | None:
    """Return the heads of an attention module, and None for other modules."""
    # Latent attention expands its keys and values to one head per query head.
    latent = _number(module, "qk_head_dim")
    dim = latent or _number(module, "head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
    if dim is None:
        return None
    # An adapter stores the layer that it adapts as `base_layer`.
    layers = [getattr(child, "base_layer", child) for child in module.children()]
    linears = [layer for layer in layers if isinstance(layer, (Linear, quantized.QuantizedLinear))]
    if len(linears) >= 3 and not latent:
        query, key = (_outputs(linear) // dim for linear in linears[:2])
        # Some query projections also compute a gate.
        groups = _number(module, "num_key_value_groups")
        return Heads(query if groups is None else key * groups, key, dim, dim)
    if "Attention" not in type(module).__name__ and not latent:
        return None
    config = getattr(module, "config", None)
    heads = _number(module, "num_heads", "num_attention_heads") or _number(config, "num_attention_heads")
    if heads is None:
        return None
    kv_heads = _number(module, "num_key_value_heads", "num_kv_heads", "kv_heads")
    kv_heads = heads if latent else kv_heads or _number(config, "num_key_value_heads") or heads
    share = min((_outputs(linear) / linear.out_features for linear in linears), default=1)
    return Heads(int(heads * share), max(1, int(kv_heads * share)), dim, _number(module, "v_head_dim") or dim)


def _number(owner: object, *names: str) -> int | None:
    """Return the first of these attributes that is an integer, or None."""
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _outputs(linear: Any) -> int:
    """Return the number of output features; for a sharded layer, the number on this rank."""
    weight = linear._parameters.get("weight")
    return len(local(weight)) if hasattr(weight, "device_mesh") else int(linear.out_features)


def _softcap(module: nn.Module) -> bool:
    names = ("attn_logit_softcapping", "attn_logit_softcap")
    return any(getattr(owner, name, None) for owner in (module, getattr(module, "config", None)) for name in names)


def _adds_bias(module: nn.Module) -> bool:
    """Return whether the stock forward adds a position bias to the scores, which hf_rocm passes as a mask."""
    binding = bind.binding_of(module)
    names = set() if binding is None else set(inspect.signature(binding.stock).parameters)
    return "position_bias" in names or ("alibi" in names and getattr(getattr(module, "config", None), "alibi", True))
