"""The calls that a model makes, as specifications of the operations: what `explain` asks the router about."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_rocm.layers.mlp import activation_of
from hf_rocm.ops.activation import ActivationSpec
from hf_rocm.ops.attention import AttentionSpec
from hf_rocm.ops.linear import LinearSpec
from hf_rocm.ops.norm import NormSpec
from hf_rocm.ops.padded import packed_specification, packing_serves
from hf_rocm.overlay import bind
from hf_rocm.weights.fuse import fused

Specification = tuple[str, str, tuple[Any, ...]]


def specifications(model: nn.Module) -> list[Specification]:
    """(operation, situation, specification) of the model's typical inference calls, each once."""
    found: dict[Specification, None] = {}
    for module in model.modules():
        if bind.mode_of(module) == bind.OFF:
            continue
        found.update(dict.fromkeys(_of_module(module)))
    return sorted(found, key=lambda each: ("attention" not in each[0], each[0]))


def _of_module(module: nn.Module) -> Iterator[Specification]:
    parameter = next(module.parameters(), None)
    if parameter is None:
        return
    dtype, device = parameter.dtype, parameter.device
    with torch.no_grad():
        held = fused(module)
    if held is not None:
        n, k = held.weight.shape
        spec = LinearSpec(dtype, dtype, device, n, k, None if held.bias is None else held.bias.dtype, True, False)
        yield "linear", f"{' + '.join(held.names)}, {n} × {k}", tuple(spec)
        activation = activation_of(getattr(module, "act_fn", None))
        if activation is not None:
            yield "act_and_mul", activation, tuple(ActivationSpec(dtype, device, n // 2, activation, False))
    if [name for name, _ in module.named_children()] == [] and getattr(module, "weight", None) is parameter:
        one_plus = not hasattr(module, "variance_epsilon")
        spec_of_norm = NormSpec(dtype, dtype, device, parameter.shape[-1], one_plus, False)
        yield "rms_norm", f"{'1 + w' if one_plus else 'w'}, {parameter.shape[-1]}", tuple(spec_of_norm)
    yield from _of_attention(module, dtype, device)


def _of_attention(module: nn.Module, dtype: torch.dtype, device: torch.device) -> Iterator[Specification]:
    head_dim = getattr(module, "head_dim", None) or getattr(module, "attention_head_size", None)
    if head_dim is None:
        return
    rows = [child.weight.shape[0] // head_dim for child in module.children() if isinstance(child, nn.Linear)]
    if len(rows) < 3:
        return
    heads, kv_heads = rows[0], rows[1]
    causal = bool(getattr(module, "is_causal", getattr(module, "is_decoder", False)))
    common = (dtype, device, heads, kv_heads, head_dim, head_dim)
    packed = packed_specification(*common, causal=causal)
    if packing_serves(packed):
        padding = "left-padded batch" if causal else "padded batch"
        yield "varlen_attention", f"{padding}, packed, {heads} heads on {kv_heads}, dim {head_dim}", tuple(packed)
    situations = {"prefill": (False, True, causal, None), "padded batch": (False, True, False, torch.bool)}
    if causal:
        situations["decode"] = (True, False, False, None)
    for situation, (one_query, square, is_causal, mask) in situations.items():
        spec = AttentionSpec(
            dtype=dtype,
            device=device,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=head_dim,
            one_query=one_query,
            square=square,
            more_queries=False,
            causal=is_causal,
            window=None,
            softcap=False,
            sinks=False,
            mask=mask,
            grad=False,
            weights=False,
        )
        yield "attention", f"{situation}, {heads} heads on {kv_heads}, dim {head_dim}", tuple(spec)
