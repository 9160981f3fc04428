"""encode: run a quantised checkpoint's layers with hf_rocm's kernels, in place and without rounding the weights.

Layers with the same input share an encoded weight if their tensors allow it. One group is converted at a time, so that
the peak memory is that of the model plus one group.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from hf_rocm.overlay import bind
from hf_rocm.weights.quantize import freeze, nbytes, summary
from hf_rocm.weights.quantize_plan import Group
from hf_rocm.weights.quantized import REPORT, group_layers
from hf_rocm.weights.stored_experts import StoredExperts
from hf_rocm.weights.stored_linear import EncodedLinear, StoredLinear
from hf_rocm.weights.tied_weights import first_shared, shared

_log = logging.getLogger("hf_rocm")


def encode(model: nn.Module) -> None:
    """Encode every eligible `StoredLinear` of a model. The report lists the others, with the reasons.

    Kernels read `StoredExperts` in place. All parameters stop requiring gradients, because quantised layers have no
    gradients.
    """
    stored = [module for module in model.modules() if isinstance(module, (StoredLinear, StoredExperts))]
    if not stored:
        return
    groups, left = _plan(model)
    experts = [module for module in stored if isinstance(module, StoredExperts)]
    if not groups and not left and not experts:
        return
    before, formats, count = nbytes(model), {module.format.described() for module in experts}, len(experts)
    for module in experts:
        module.use_kernels()
    with torch.inference_mode(False), torch.no_grad():
        for group in groups:
            formats.add(_encode(group))
            count += len(group.names)
    model.__dict__[REPORT] = {
        "kind": "checkpoint",
        "format": ", ".join(sorted(formats)) or None,
        "layers": count,
        "left": left,
        "kept": None,
        "bytes": [before, nbytes(model)],
        "error": None,
        "froze": freeze(model),
    }
    _log.info("%s: %s", type(model).__name__, summary(model))


def _plan(model: nn.Module) -> tuple[list[Group], dict[str, str]]:
    """Return the groups of layers to encode, and path → the reason why a layer stays in the checkpoint's format."""
    groups, left, others = list[Group](), dict[str, str](), None
    for path, module in model.named_modules():
        eligible = []
        for name, child in module._modules.items():
            if not isinstance(child, StoredLinear):
                continue
            others = shared(model) if others is None else others
            reason = _refusal(child) or first_shared([*child.tensors().values(), child.bias], others)
            if reason is None:
                eligible.append(name)
            else:
                left[f"{path}.{name}" if path else name] = reason
        if not eligible:
            continue
        binding = bind.binding_of(module)
        fused = tuple(binding.fuses) if binding is not None else ()
        if len(fused) > 1 and set(fused) <= set(eligible) and _alike(module, fused):
            groups.append(Group(module, path, fused))
            eligible = [name for name in eligible if name not in fused]
        groups += [Group(module, path, (name,)) for name in eligible]
    return groups, left


def _refusal(layer: StoredLinear) -> str | None:
    """Return the reason why this layer is left unchanged, or None."""
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "it has a forward hook"
    if "forward" in layer.__dict__ and getattr(layer.__dict__.get("_hf_hook"), "offload", True):
        return "it has its own forward"
    if any(tensor.is_meta for tensor in layer.tensors().values()):
        return "it is offloaded"
    return layer.format.refuses(layer.out_features, layer.in_features)


def _alike(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Return whether these layers can be encoded into one weight."""
    layers: list[Any] = [module._modules[name] for name in names]
    first = layers[0]
    return all(
        (layer.format, layer.in_features, layer.dtype, layer.bias is None)
        == (first.format, first.in_features, first.dtype, first.bias is None)
        and next(iter(layer.tensors().values())).device == next(iter(first.tensors().values())).device
        and first.format.joins(first.tensors(), layer.tensors())
        for layer in layers[1:]
    )


def _encode(group: Group) -> str:
    """Replace the layers of a group. Returns the description of their format."""
    module, names = group.module, group.names
    layers: list[Any] = [module._modules[name] for name in names]
    first: StoredLinear = layers[0]
    bias = None if first.bias is None else torch.cat([layer.bias.detach() for layer in layers])
    n = sum(layer.out_features for layer in layers)
    weight, start = first.format.empty(n, first.in_features, [layer.tensors() for layer in layers], bias), 0
    for name, layer in zip(names, layers, strict=True):
        layer.format.put(weight, start, layer.tensors())
        module._modules[name] = EncodedLinear(layer, weight, start)
        start += layer.out_features
    weight.written(first.dtype)
    if len(names) > 1:
        group_layers(module, names)
    if weight.scale.is_cuda:
        # The freed memory does not fit the next allocations.
        torch.cuda.empty_cache()
    return first.format.described()
