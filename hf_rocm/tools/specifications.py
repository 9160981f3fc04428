"""The calls that a model makes, as specifications of operations. `explain` shows which implementations serve them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_rocm.layers.decoder import PreNormLayer
from hf_rocm.layers.grouped_linear import live
from hf_rocm.layers.mlp import activation_of
from hf_rocm.layers.norm import RMSNorm
from hf_rocm.layers.router import GroupedRouter, TopKRouter
from hf_rocm.ops import routing
from hf_rocm.ops.moe import BOUNDS, MANY
from hf_rocm.ops.specs.experts import ExpertsSpec
from hf_rocm.ops.specs.linear import LinearSpec
from hf_rocm.ops.specs.pointwise import ActivationSpec, NormSpec
from hf_rocm.overlay import bind
from hf_rocm.tools.attention_specifications import of_attention
from hf_rocm.tools.rotary_specifications import of_angles, of_rotation, rotated_dims
from hf_rocm.weights import mxfp4_experts, quantized
from hf_rocm.weights.preshuffle import shuffled_weight

Specification = tuple[str, str, tuple[Any, ...]]


def specifications(model: nn.Module) -> list[Specification]:
    """Return the distinct (operation, situation, specification) tuples of the model's typical inference calls."""
    specs: dict[Specification, None] = {}
    dims = rotated_dims(model)
    dtype = next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), torch.float32)
    for path, module in model.named_modules():
        specs.update(dict.fromkeys(of_angles(module, dtype)))
        specs.update(dict.fromkeys(_of_shuffled(module)))
        if bind.mode_of(module) == bind.OFF:
            continue
        specs.update(dict.fromkeys(_of_module(module, path, dims)))
    for situation, spec in quantized.specifications(model):
        specs["quantized_linear", situation, tuple(spec)] = None
    for situation, of_experts in mxfp4_experts.specifications(model):
        specs["mxfp4_experts", situation, tuple(of_experts)] = None
    return sorted(specs, key=lambda entry: ("attention" not in entry[0], entry[0]))


def _of_module(module: nn.Module, path: str, dims: dict[str, set[int]]) -> Iterator[Specification]:
    parameter: Any = next(module.parameters(), None)
    eight_bit = next((child for child in module.children() if isinstance(child, quantized.QuantizedLinear)), None)
    if parameter is None and eight_bit is None:
        return
    dtype = parameter.dtype if eight_bit is None else eight_bit.dtype
    device = device_of(module, parameter) if eight_bit is None else eight_bit.quantized.scale.device
    with torch.no_grad():
        weights = live(module)
        group = quantized.group_of(module)
    fused = weights if weights is not None and weights.names and weights.weight is not None else None
    if fused is not None:
        n, k = fused.weight.shape
        spec = LinearSpec(dtype, dtype, device, n, k, None if fused.bias is None else fused.bias.dtype, True, False)
        yield "linear", f"{' + '.join(fused.names)}, {n} × {k}", tuple(spec)
    if fused is not None or group is not None:
        n = len(fused.weight if group is None else group.data)  # type: ignore[union-attr]
        activation = activation_of(getattr(module, "act_fn", None))
        if activation is not None:
            yield "act_and_mul", activation, tuple(ActivationSpec(dtype, device, n // 2, activation, False))
    declared = getattr(bind.binding_of(module), "layer", None)
    if isinstance(declared, (TopKRouter, GroupedRouter)):
        wide, terms = isinstance(declared, GroupedRouter), declared.terms(module)
        with torch.no_grad():
            of_router = routing.specification_for(parameter, experts=len(parameter), wide=wide, **terms)
        yield "choose_experts", f"{terms['top']} of {len(parameter)}, {terms['scores']}", of_router
    elif [name for name, _ in module.named_children()] == [] and getattr(module, "weight", None) is parameter:
        yield "rms_norm", *_of_norm(module, parameter)
    yield from _of_experts(module)
    norm = _norm_after_sum(module)
    if norm is not None:
        yield "add_rms_norm", *_of_norm(norm, norm.weight)
    yield from of_attention(module, dtype, device)
    yield from of_rotation(module, path, dims, dtype, device)


def _norm_after_sum(module: nn.Module) -> nn.Module | None:
    """Return the norm that a decoder layer computes together with the sum before it, or None."""
    binding = bind.binding_of(module)
    layer = getattr(binding, "layer", None)
    if binding is None or not isinstance(layer, PreNormLayer):
        return None
    if "position_embeddings_global" in inspect.signature(binding.stock).parameters:
        # In transformers 4, the layers of Gemma3 take two tables of angles and run the stock forward.
        return None
    norm = module._modules[layer.norms[1]]
    served = norm is not None and bind.mode_of(norm) != bind.OFF
    return norm if served and isinstance(getattr(bind.binding_of(norm), "layer", None), RMSNorm) else None


def _of_norm(norm: nn.Module, weight: Any) -> tuple[str, tuple[Any, ...]]:
    """Return the (situation, specification) of a norm, which are the same with and without a sum before it."""
    one_plus = not hasattr(norm, "variance_epsilon")
    spec = NormSpec(weight.dtype, weight.dtype, device_of(norm, weight), weight.shape[-1], one_plus, False)
    return f"{'1 + w' if one_plus else 'w'}, {weight.shape[-1]}", tuple(spec)


def device_of(module: nn.Module, parameter: nn.Parameter) -> torch.device:
    """Return the device on which a parameter is used: for an offloaded one, where accelerate's hook moves it."""
    device = getattr(module.__dict__.get("_hf_hook"), "execution_device", None)
    return torch.device(device) if parameter.is_meta and device is not None else parameter.device


def _of_shuffled(module: nn.Module) -> Iterator[Specification]:
    shuffled = shuffled_weight(module)
    if shuffled is not None:
        data, bias, names = shuffled
        n, k = data.shape
        bias_dtype = None if bias is None else bias.dtype
        spec = LinearSpec(data.dtype, data.dtype, data.device, n, k, bias_dtype, True, False)
        yield "shuffled_linear", f"{names}{n} × {k}", tuple(spec)


def _of_experts(module: nn.Module) -> Iterator[Specification]:
    with torch.no_grad():
        group: Any = live(module)
    group = group if hasattr(group, "gate_up") else None
    gate_up: Any = module._parameters.get("gate_up_proj") if group is None else group.gate_up
    if gate_up is None or gate_up.dim() != 3:
        return
    down: Any = module._parameters["down_proj"] if group is None else group.down
    activation = activation_of(getattr(module, "act_fn", None) if group is None else group.activation)
    config: Any = getattr(module, "config", None)
    top_k = int(getattr(module, "top_k", 0) or getattr(config, "num_experts_per_tok", 1))
    transposed = gate_up.shape[1:] != (2 * down.shape[2], down.shape[1])
    hidden, intermediate = down.shape[:0:-1] if transposed else down.shape[1:]
    biased = group.gate_up_bias is not None if group else "gate_up_proj_bias" in module._parameters
    for situation, pairs in (("prefill", MANY), ("decode", BOUNDS[0])):
        spec = ExpertsSpec(
            dtype=gate_up.dtype,
            weight_dtype=gate_up.dtype,
            device=gate_up.device,
            experts=len(gate_up),
            hidden=hidden,
            intermediate=intermediate,
            top_k=top_k,
            activation=activation or "clamped_swiglu",
            bias=biased,
            transposed=transposed,
            interleaved=activation is None,
            weigh_input=False,
            contiguous=True,
            pairs=pairs,
            traced=False,
            grad=False,
        )
        yield "experts", f"{situation}, {top_k} of {len(gate_up)}, {hidden} × {intermediate}", tuple(spec)
