"""Routed experts: stacked parameters, as in transformers from 5.0 on, or lists of modules.

From 5.0 on, `grouped_mm` is transformers' default, and `generate` switches to `batched_mm` while it decodes. Neither
can be distinguished from a user's choice, so both are served where hf_rocm is at least as fast. Any other
implementation (eager, deepgemm, …) runs the stock forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm import ops
from hf_rocm.layers.decoder import unhooked_binding
from hf_rocm.layers.fallback_reasons import note
from hf_rocm.layers.grouped_linear import live, shuffled_experts, why_not
from hf_rocm.layers.mlp import activation_of, child
from hf_rocm.layers.norm import PrenormResidual, is_plain
from hf_rocm.layers.weight_group import SLOT
from hf_rocm.ops.experts_add import one_kernel as one_sum
from hf_rocm.ops.linear import exporting
from hf_rocm.ops.moe import max_pairs
from hf_rocm.ops.routing import one_kernel
from hf_rocm.overlay.replacements import unchanged

# Takes the rows, the ids and the weights; the function of `given_experts` also takes a residual, which it adds.
Experts = Callable[..., Tensor]

_INTERFACE = "transformers.integrations.moe"

_SPREAD = "the experts are distributed across several devices"


@dataclass(frozen=True)
class StackedExperts:
    """A module that transformers runs through its experts interface, with `gate_up_proj` and `down_proj` [E, …].

    activation, transposed, interleaved: as in `ops.experts`; without an activation, the module's `act_fn` is used, and
    the module must apply it as transformers does. limit, alpha: the names of the attributes with the parameters of the
    activation.
    """

    activation: str | None = None
    limit: str | None = None
    alpha: str | None = None
    transposed: bool = False
    interleaved: bool = False

    def forward(self, module: Any, stock: Callable[..., Any], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x: [T, H]; ids: [T, k]; weights: [T, k], or [T, E] for every expert. Returns [T, H]."""
        output = self.apply(module, x, ids, weights)
        if output is None:
            output = stock(module, x, ids, weights)
        return output

    def apply(
        self, module: Any, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None = None
    ) -> Tensor | None:
        """Return the output plus the residual [T, H], or None if the stock forward must run."""
        extra_reason = _interface_reason(module, x, ids)
        if self.activation is None and extra_reason is None and not applies_its_activation(module):
            extra_reason = "the experts have their own function to apply the activation"
        named = {"limit": self.limit, "alpha": self.alpha}
        form: dict[str, Any] = {name: getattr(module, attribute) for name, attribute in named.items() if attribute}
        flags = {"transposed": self.transposed, "interleaved": self.interleaved}
        form |= {name: True for name, flag in flags.items() if flag}
        run = given_experts(module, x, activation=self.activation, extra_reason=extra_reason, **form)
        if run is None:
            return None
        return run(x, ids, weights if weights.shape == ids.shape else weights.gather(1, ids), residual)


@dataclass(frozen=True)
class SparseMoE:
    """A sparse MLP with a router, which returns (logits, weights, ids) for rows, and the child `experts`.

    router: the name of the router. The module's stock forward runs, except in a layer with few rows, where the experts'
    kernel can include the residual sum.
    """

    router: str = "gate"

    def forward(self, module: Any, stock: Callable[..., Any], x: Tensor, fused: PrenormResidual | None = None) -> Any:
        """x: [B, S, H]. Returns what stock returns; with a residual in `fused`, the output [B, S, H] alone."""
        if fused is None or fused.residual is None:
            return stock(module, x)
        experts = child(module, "experts")
        binding = unhooked_binding(experts, x) if isinstance(experts, nn.Module) else None
        layer = None if binding is None else binding.layer
        if binding is None or not isinstance(layer, StackedExperts):
            return stock(module, x)
        rows = fused.normed(x).flatten(0, -2)
        _, weights, ids = child(module, self.router)(rows)
        output = layer.apply(experts, rows, ids, weights, fused.residual.flatten(0, -2))
        if output is None:
            output = binding.stock(experts, rows, ids, weights)
        else:
            fused.added = True
        return output.view_as(x)


@dataclass(frozen=True)
class SoftmaxMoE:
    """A sparse MLP whose `experts` are a list of gated MLPs, routed by a softmax over the logits of its child `gate`.

    experts: the names of an expert's gate, up and down layers and its activation. normalise: whether the routing
    weights are divided by their sum, or the name of the attribute with this flag. jitter: the name of the attribute
    with the range of the noise that multiplies the input in training; with this noise, the stock forward runs. shared:
    the names of the shared expert and its gate.
    """

    experts: tuple[str, str, str, str] = ("gate_proj", "up_proj", "down_proj", "act_fn")
    normalise: bool | str = True
    jitter: str | None = None
    shared: tuple[str, str] | None = None

    def forward(self, module: Any, stock: Callable[..., Any], x: Tensor) -> Any:
        """x: [B, S, H]. Returns (output [B, S, H], router logits [T, E])."""
        noise = self.jitter is not None and module.training and getattr(module, self.jitter) > 0
        run = listed_experts(module, x, extra_reason="jitter in training is left to stock" if noise else None)
        if run is None:
            return stock(module, x)
        rows = x.flatten(0, 1)
        logits = module.gate(rows)
        normalise = self.normalise if isinstance(self.normalise, bool) else getattr(module, self.normalise)
        weights, ids = softmax_top(logits, module.top_k, normalise=normalise, dtype=rows.dtype)
        output = run(rows, ids, weights)
        if self.shared is not None:
            shared_expert, gate = (module._modules[name] for name in self.shared)
            output = output + gate(rows).sigmoid() * shared_expert(rows)
        return output.view_as(x), logits


@dataclass(frozen=True)
class GatedMoE:
    """DeepSeek's sparse MLP: `experts` is a list of gated MLPs, the child `gate` returns ids and weights, and
    `shared_experts` is applied to every row. experts: as in `SoftmaxMoE`."""

    experts: tuple[str, str, str, str] = ("gate_proj", "up_proj", "down_proj", "act_fn")

    def forward(self, module: Any, stock: Callable[..., Any], x: Tensor) -> Tensor:
        """x: [B, S, H]. Returns [B, S, H]."""
        run = listed_experts(module, x)
        if run is None:
            result: Tensor = stock(module, x)
            return result
        ids, weights = module.gate(x)
        output: Tensor = run(x.flatten(0, 1), ids, weights).view_as(x) + module.shared_experts(x)
        return output


def given_experts(
    module: Any,
    x: Tensor,
    *,
    gate_up: str = "gate_up_proj",
    down: str = "down_proj",
    activation: str | None = None,
    act_fn: str = "act_fn",
    extra_reason: str | None = None,
    **form: Any,
) -> Experts | None:
    """Return a function for the experts of a module that stacks their weights in parameters, or None.

    gate_up, down: the parameters' names, dotted for parameters of children; biases are named `…_bias`. activation: as
    in `ops.experts`; by default, that of the child that act_fn names. extra_reason: the overlay's reason to run the
    stock forward. form: the other keyword arguments of `ops.experts`. x: [T, H]. Returns what `listed_experts` returns.
    """
    function = None if activation else _function(module, act_fn)
    known = activation or activation_of(function)
    tensors = {name: _named(module, name) for name in (gate_up, down, f"{gate_up}_bias", f"{down}_bias")}
    reason = extra_reason or _unserved(x) or _refuses_parameters(module, x, tensors)
    if reason is None and known is None:
        reason = "the experts' activation is not supported by ops.experts, or it was changed"
    note(module, reason)
    if reason is not None:
        return None
    first, second, first_bias, second_bias = tensors.values()

    def run(rows: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
        copies = None if form or first_bias is not None else shuffled_experts(module, rows)
        terms = {"activation": known or "", "gate_up_bias": first_bias, "down_bias": second_bias, **form}
        tensors = rows, first, second, ids, weights
        if copies is not None:
            output = ops.shuffled_experts(rows, *copies, ids, weights, activation=known or "")
        elif residual is not None and one_sum(residual, *tensors, **terms):
            return ops.experts_add(residual, *tensors, **terms)
        else:
            output = ops.experts(*tensors, **terms)
        return output if residual is None else residual + output

    return run


def listed_experts(module: Any, x: Tensor, *, extra_reason: str | None = None) -> Experts | None:
    """Return a function for the experts of a module whose `experts` are a list of gated MLPs that `prepare` stacked.

    x: the module's input. extra_reason: the overlay's reason to run the stock forward. Returns the function
    (rows [T, H], ids [T, k], weights [T, k]) → [T, H], or None if the stock forward must run.
    """
    stacked = extra_reason or _unserved(x) or _listed(module, x)
    note(module, stacked if isinstance(stacked, str) else None)
    if isinstance(stacked, str):
        return None
    group, activation = stacked

    def run(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        copies = shuffled_experts(module, rows)
        if copies is not None:
            return ops.shuffled_experts(rows, *copies, ids, weights, activation=activation)
        return ops.experts(
            rows,
            group.gate_up,
            group.down,
            ids,
            weights,
            activation=activation,
            gate_up_bias=group.gate_up_bias,
            down_bias=group.down_bias,
        )

    return run


def _listed(module: Any, x: Tensor) -> tuple[Any, str] | str:
    """Return the stacked experts and their activation, or why the stock forward must run."""
    if torch.compiler.is_compiling():
        return "while torch.compile or torch.export traces, a list of experts is left to stock"
    group: Any = live(module)
    if group is None:
        empty = module.__dict__.get(SLOT) is None
        return "the experts are not stacked" if empty else why_not(module) or "a layer of an expert was changed"
    if group.gate_up.dtype != x.dtype or group.gate_up.device != x.device:
        return (
            f"the input is {x.dtype} on {x.device}, but the experts are {group.gate_up.dtype} on {group.gate_up.device}"
        )
    if not all(unchanged(kind) for kind in {type(expert) for expert in module.experts}):
        return "the forward of the experts' class, or a function that it calls, was replaced"
    activation = activation_of(group.activation)
    return "the experts' activation is not supported by ops.experts" if activation is None else (group, activation)


def softmax_top(logits: Tensor, top: int, *, normalise: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Standard routing: return the `top` largest values of a softmax in fp32, divided by their sum if `normalise`.

    logits: [T, E]. Returns (weights [T, k] in dtype, ids [T, k]). Shazeer et al. 2017.
    """
    if one_kernel(logits, experts=logits.shape[1], top=top, normalise=normalise, dtype=dtype):
        return ops.choose_experts(logits, top=top, normalise=normalise, dtype=dtype)
    chosen, ids = logits.softmax(1, dtype=torch.float32).topk(top, dim=-1)
    if normalise:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return chosen.to(dtype), ids


def untouched(*modules: Any) -> bool:
    """Return whether a forward need not call these modules: see `norm.is_plain`."""
    return all(map(is_plain, modules))


def _interface_reason(module: Any, x: Tensor, ids: Tensor) -> str | None:
    """Return why this call of transformers' experts interface is left to stock, or None."""
    selected = getattr(getattr(module, "config", None), "_experts_implementation", "grouped_mm")
    if selected == "batched_mm":
        if x.device.type == "cpu" or ids.numel() > max_pairs(x):
            return "the experts implementation 'batched_mm' is served only on a GPU and only for a few tokens"
    elif selected != "grouped_mm":
        return f"the experts implementation {selected!r} is selected, but only 'grouped_mm' and 'batched_mm' are served"
    interface = sys.modules[_INTERFACE]
    if interface.ALL_EXPERTS_FUNCTIONS[selected] is not getattr(interface, f"{selected}_experts_forward"):
        return f"the registered experts implementation {selected!r} is not transformers' own function"
    if not unchanged(interface.ALL_EXPERTS_FUNCTIONS[selected]):
        return f"a function that the experts implementation {selected!r} calls was replaced"
    if getattr(module, "_is_expert_parallel", False) or getattr(module, "_hf_tp_plan", None) is not None:
        return _SPREAD
    return None


def _refuses_parameters(module: Any, x: Tensor, tensors: dict[str, Any]) -> str | None:
    for name, tensor in tensors.items():
        if tensor is None and name.endswith("_bias"):
            continue
        if type(tensor) is not nn.Parameter or tensor.dtype != x.dtype or tensor.device != x.device:
            return f"{name} is not a plain parameter of the input's dtype on its device"
        if len(tensor) != getattr(module, "num_experts", len(tensor)):
            return _SPREAD
        if not torch.compiler.is_compiling() and tensor.data_ptr() % 16:
            return f"{name} is not aligned to 16 bytes"
    return None


def _unserved(x: Tensor) -> str | None:
    if torch.is_autocast_enabled(x.device.type):
        return "under autocast, experts are left to stock"
    if torch.compiler.is_compiling() and (x.dtype != torch.bfloat16 or exporting()):
        return "while torch.compile traces, experts are served only in bf16, and while torch.export traces, not at all"
    return None


def applies_its_activation(module: Any) -> bool:
    """Return whether the module applies its activation as transformers does by default: act(gate) · up."""
    gate = getattr(type(module), "_apply_gate", None)
    return gate is None or (gate.__module__ == _INTERFACE and "_apply_gate" not in module.__dict__)


def _function(module: Any, path: str) -> Any:
    """Return the activation with this name, which is dotted for activations of children."""
    *parents, name = path.split(".")
    for parent in parents:
        module = child(module, parent)
    return child(module, name)


def _named(module: Any, path: str) -> Any:
    """Return the parameter with this dotted name, or None."""
    *parents, name = path.split(".")
    for parent in parents:
        module = module._modules[parent]
    return module._parameters.get(name)
