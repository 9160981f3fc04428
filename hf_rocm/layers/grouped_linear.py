"""Compute the outputs of linear layers with the same input through the weight group of their module.

`live` checks the pointers in every call, except while torch.compile or torch.export traces. After any change to a model
with grouped weights, the worst outcome is that the layers run one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, compiler
from torch._C import _get_tracing_state
from torch.nn import Module, Parameter, functional
from torch.nn.modules import module as torch_module

# Not from torch.nn, where the name may have been replaced.
from torch.nn.modules.linear import Linear

from hf_rocm import ops
from hf_rocm.layers.weight_group import NOT_PREPARED, SLOT, WeightGroup, kind_in, names_in, wake
from hf_rocm.ops.custom_op import compiling
from hf_rocm.overlay.dependencies import Reference, of_call
from hf_rocm.overlay.replacements import constant_in_traces, replacement_among

_hooks_on_all = torch_module._global_forward_hooks
_pre_hooks_on_all = torch_module._global_forward_pre_hooks
_LINEARS = (Reference(Linear, "forward"), Reference(vars(functional), "linear"), *of_call(Linear))
_linear, _product, _call, _call_body = (None if replacement_among((place,)) else place.value() for place in _LINEARS)


def product(module: Module, x: Tensor, *, norm: ops.Norm | None = None, activation: str | None = None) -> Tensor | None:
    """Return the concatenated outputs of the module's group, or None if its layers must be called.

    x: [..., K]. norm: applied to x first. activation: the outputs are [gate | up], and act(gate) · up is returned.
    Returns [..., N_1 + N_2 + …], or half of that with an activation. If gradients are required, even if only for x,
    the layers must be called, unless they are quantised.
    """
    if compiling() or compiler._is_compiling_flag:
        return _traced(module, x, norm, activation)
    group = live(module)
    if group is None:
        return None
    if not group.plain:
        return group.multiply(module, x, norm, activation)
    if x.requires_grad and torch.is_grad_enabled():
        return None
    if norm is None and activation is None:
        return ops.linear(x, group.weight, group.bias)
    return ops.fused_linear(x, group.weight, group.bias, norm=norm, activation=activation)


def project(
    module: Module, x: Tensor, *, norm: ops.Norm | None = None, head_dim: int | None = None
) -> tuple[Tensor, ...] | None:
    """Split `product` into the layers' outputs [..., N_i], which are views of one tensor.

    Returns None if `product` does, or if another thread has dropped the group in the meantime.

    head_dim: x is [B, S, K], and the outputs are split into heads: [B, N_i / head_dim, S, head_dim].
    """
    joined = product(module, x, norm=norm)
    if joined is None:
        return None
    sizes: tuple[int, ...] | None = getattr(module.__dict__.get(SLOT), "sizes", None)
    if not sizes:
        # Another thread has dropped the group.
        return None
    # A view takes more than 1 µs of host time; Tensor.split, which is written in Python, takes twice that.
    if head_dim is None:
        return joined.split_with_sizes(sizes, -1)
    heads = joined.view((*joined.shape[:-1], joined.shape[-1] // head_dim, head_dim)).transpose(1, 2)
    return heads.split_with_sizes([size // head_dim for size in sizes], 1)


def live(module: Module) -> WeightGroup | None:
    """Return the module's group if it can replace the module's layers now, or None if they must be called.

    Every forward runs this check of the pointers, except while torch.compile or torch.export traces. Returns None while
    gradients are enabled and a weight or bias requires them.
    """
    own = module.__dict__
    group = own.get(SLOT)
    if not group:
        return None
    if group.__class__ is tuple:
        wake(module)
        return None if own.get(SLOT).__class__ is tuple else live(module)
    if _hooks_on_all or _pre_hooks_on_all or _get_tracing_state() is not None:
        return None
    if group.structured and not group.unchanged(module):
        return None
    if not linears_are_pytorchs():
        return None
    gradients = torch.is_grad_enabled()
    children = own["_modules"]
    for owner, name, forward, hooks, address, nbytes, bias_address in group.parts:
        linear = (children if owner is None else owner).get(name)
        if linear.__class__ is not Linear:
            return _modified(module, group)
        attributes = linear.__dict__
        if (hooks or attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]) and hooks_of(linear) != hooks:
            return _modified(module, group)
        if attributes.get("forward") is not forward and not group.accepts(module, linear, name):
            return _modified(module, group)
        parameters = attributes["_parameters"]
        # FSDP1 removes the parameters from this dict.
        weight, bias = parameters.get("weight"), parameters.get("bias")
        memory = weight
        if weight.__class__ is not Parameter:
            # torch.func substitutes plain tensors for one call; anything else is permanent
            memory = None if weight.__class__ is Tensor else group.memory_of(weight)
            if memory is None:
                return None if weight.__class__ is Tensor else group.forget(module)
        # nbytes and is_contiguous detect a shortened or transposed view at the old address
        if memory.data_ptr() != address or memory.nbytes != nbytes or not memory.is_contiguous():
            return group.forget(module)
        if gradients and weight.requires_grad:
            return None
        if bias_address is None:
            if bias is not None:
                return group.forget(module)
            continue
        memory = bias
        if bias.__class__ is not Parameter:
            memory = None if bias.__class__ is Tensor else group.memory_of(bias)
            if memory is None:
                return None if bias.__class__ is Tensor else group.forget(module)
        if memory.data_ptr() != bias_address or not memory.is_contiguous():
            return group.forget(module)
        if gradients and bias.requires_grad:
            return None
    checked: WeightGroup = group
    return checked


def lies_in(group: WeightGroup, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> bool:
    """Return whether a group consists of exactly these tensors: the comparison of `live`, without the modules."""
    parts = group.parts
    biased = bool(parts) and parts[0].bias is not None
    return (
        len(weights) == len(parts)
        and len(biases) == (len(parts) if biased else 0)
        and all(
            weight.data_ptr() == part.weight and weight.nbytes == part.nbytes and weight.is_contiguous()
            for part, weight in zip(parts, weights, strict=True)
        )
        and all(
            bias.data_ptr() == part.bias and bias.is_contiguous() for part, bias in zip(parts, biases, strict=False)
        )
    )


def intact(module: Module, group: WeightGroup) -> bool:
    """Return whether the parameters are still in the group, even if the group can't run. Changes nothing."""
    tensors: dict[str, list[Any]] = {"weight": [], "bias": []}
    for part in group.parts:
        linear = part.layer(module)
        if type(linear) is not Linear:
            return False
        for label, collected in tensors.items():
            parameter = linear._parameters.get(label)
            if parameter is not None:
                collected.append(parameter if type(parameter) is Parameter else group.memory_of(parameter))
    weights, biases = tensors.values()
    return not any(tensor is None for tensor in (*weights, *biases)) and lies_in(group, weights, biases)


def shuffled_experts(module: Module, x: Tensor) -> tuple[ops.Shuffled, ops.Shuffled] | None:
    """Return shuffled copies of gate_up [E, 2I, H] and down [E, H, I] that serve x [T, H], or None."""
    group = module.__dict__.get(SLOT)
    if not group or group.__class__ is tuple or compiling() or compiler._is_compiling_flag:
        return None
    copies: tuple[ops.Shuffled, ops.Shuffled] | None = group.shuffled_experts(module, x)
    return copies


def why_not(module: Module) -> str | None:
    """Return why the group in the module's slot can't run now, as a sentence; None if it can."""
    kind = kind_in(module)
    return NOT_PREPARED if kind is None else kind.why_not(module, names_in(module))


@constant_in_traces
def linears_are_pytorchs() -> bool:
    """Return whether `nn.Linear` is PyTorch's own, apart from hf_rocm's changes."""
    if Linear.forward is _linear and functional.linear is _product and Linear.__call__ is _call:
        return Linear._call_impl is _call_body
    return replacement_among(_LINEARS) is None


def hooks_on_all() -> bool:
    """Return whether forward hooks are registered on all modules, so that every layer must be called."""
    return bool(_hooks_on_all or _pre_hooks_on_all)


def hooks_of(linear: Any) -> tuple[object, ...]:
    own = linear.__dict__
    return (*own["_forward_pre_hooks"].values(), *own["_forward_hooks"].values())


def _traced(module: Module, x: Tensor, norm: ops.Norm | None, activation: str | None) -> Tensor | None:
    group = module.__dict__.get(SLOT)
    if not group or group.__class__ is tuple or Linear.forward is not _linear or functional.linear is not _product:
        return None
    if norm is not None:
        x = ops.rms_norm(x, norm.weight, eps=norm.eps, one_plus=norm.one_plus)
    joined: Tensor | None = group.traced(module, x)
    return joined if joined is None or activation is None else ops.act_and_mul(joined, activation=activation)


def _modified(module: Module, group: WeightGroup) -> WeightGroup | None:
    """Handle a modified layer. Returns None, so that the layers are called, and keeps the group.

    If a weight has left the group (offload), calls `forget` and returns its result.
    """
    for part in group.parts:
        linear = part.layer(module)
        if type(linear) is Linear:
            weight = linear._parameters.get("weight")
            if type(weight) is Parameter and weight.data_ptr() != part.weight:
                return group.forget(module)
    return None
