"""The routed experts of a mixture: stacked parameters as transformers has them from 5.0 on, and lists of modules.

From 5.0 on, `grouped_mm` is what transformers chooses when nothing is asked for, and `batched_mm` is what its generate
switches to by itself while it decodes; neither can be told from a request, and both are served where ours does the
same or better. Whoever asks for anything else (eager, deepgemm, …) gets exactly that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm import ops
from hf_rocm.layers.mlp import activation_of
from hf_rocm.layers.notes import note
from hf_rocm.ops.linear import exporting
from hf_rocm.ops.moe import most_pairs
from hf_rocm.weights.experts import STATE, Stacked, stacked, why_not
from hf_rocm.weights.experts_shuffled import KEPT, shuffled

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]

_INTERFACE = "transformers.integrations.moe"

_SPREAD = "the experts are spread over several devices"


def stacked_experts(
    module: Any, stock: Callable[..., Any], x: Tensor, ids: Tensor, weights: Tensor, **terms: Any
) -> Tensor:
    """For a module that transformers runs through its experts interface: `gate_up_proj` and `down_proj`, [E, …] each.

    x: [T, H]; ids: [T, k]; weights: [T, k], or [T, E] for every expert. terms: as `given_experts` takes them; without
    an activation it is the module's `act_fn`, and its way to apply it must be transformers' own. Returns [T, H].
    """
    further = _asked_for(module, x, ids)
    if "activation" not in terms and further is None and not _applies_its_activation(module):
        further = "the experts apply their activation in a way of their own"
    run = given_experts(module, x, further=further, **terms)
    if run is None:
        result: Tensor = stock(module, x, ids, weights)
        return result
    return run(x, ids, weights if weights.shape == ids.shape else weights.gather(1, ids))


def given_experts(
    module: Any,
    x: Tensor,
    *,
    gate_up: str = "gate_up_proj",
    down: str = "down_proj",
    activation: str | None = None,
    act_fn: str = "act_fn",
    further: str | None = None,
    **form: Any,
) -> Experts | None:
    """For a module with the weights of its experts stacked in parameters, and perhaps biases `…_bias` beside them.

    gate_up, down: the parameters' names, with dots for those of children. activation: as in `ops.experts`; unless it
    is given, that of the child act_fn. further: a reason to stay stock that the overlay itself found. form: the
    remaining keywords of `ops.experts`. x: [T, H]. Returns what `listed_experts` returns.
    """
    function = None if activation else _named(module, act_fn)
    found = activation or activation_of(function)
    tensors = {name: _named(module, name) for name in (gate_up, down, f"{gate_up}_bias", f"{down}_bias")}
    reason = further or _unserved(x) or _unlike(module, x, tensors)
    if reason is None and found is None:
        reason = "ops.experts doesn't know the experts' activation, or it was changed"
    note(module, reason)
    if reason is not None:
        return None
    first, second, first_bias, second_bias = tensors.values()

    def run(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        kept = None if form or first_bias is not None else _kept(module, rows)
        if kept is not None:
            return ops.shuffled_experts(rows, *kept, ids, weights, activation=found or "")
        return ops.experts(
            rows,
            first,
            second,
            ids,
            weights,
            activation=found or "",
            gate_up_bias=first_bias,
            down_bias=second_bias,
            **form,
        )

    return run


def listed_experts(module: Any, x: Tensor, *, further: str | None = None) -> Experts | None:
    """For a module whose `experts` are a list of gated MLPs that the loader stacked.

    x: what the module is called with. further: a reason to stay stock that the overlay itself found. Returns the
    function (rows [T, H], ids [T, k], weights [T, k]) → [T, H], or None: then the stock forward must run.
    """
    found = further or _unserved(x) or _listed(module, x)
    note(module, found if isinstance(found, str) else None)
    if isinstance(found, str):
        return None
    held, activation = found

    def run(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        kept = _kept(module, rows)
        if kept is not None:
            return ops.shuffled_experts(rows, *kept, ids, weights, activation=activation)
        return ops.experts(
            rows,
            held.gate_up,
            held.down,
            ids,
            weights,
            activation=activation,
            gate_up_bias=held.gate_up_bias,
            down_bias=held.down_bias,
        )

    return run


def _listed(module: Any, x: Tensor) -> tuple[Stacked, str] | str:
    """The stacked experts and their activation, or why there are none."""
    if torch.compiler.is_compiling():
        return "while torch.compile traces, a list of experts is stock's"
    held = stacked(module)
    if held is None:
        state = module.__dict__.get(STATE)
        names = getattr(state, "names", state)
        if names is None:
            return "the experts are not stacked"
        return why_not(module, names) or "a layer of an expert was changed"
    if held.gate_up.dtype != x.dtype or held.gate_up.device != x.device:
        return f"the input is {x.dtype} on {x.device}, the experts are {held.gate_up.dtype} on {held.gate_up.device}"
    activation = activation_of(held.activation)
    return "ops.experts doesn't know the experts' activation" if activation is None else (held, activation)


def softmax_top(logits: Tensor, top: int, *, normalise: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The usual routing: the `top` largest of a softmax in fp32, divided by their sum if they are to be normalised.

    logits: [T, E]. Returns (weights [T, k] in dtype, ids [T, k]). Shazeer et al. 2017.
    """
    chosen, ids = logits.softmax(1, dtype=torch.float32).topk(top, dim=-1)
    if normalise:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return chosen.to(dtype), ids


def untouched(*modules: Any) -> bool:
    """Whether a forward may do without calling these modules: no hooks, no forward of their own."""
    return not any(each._forward_hooks or each._forward_pre_hooks or "forward" in each.__dict__ for each in modules)


def _asked_for(module: Any, x: Tensor, ids: Tensor) -> str | None:
    """Why transformers' experts interface is not to be served in this call, or None."""
    asked = getattr(getattr(module, "config", None), "_experts_implementation", "grouped_mm")
    if asked == "batched_mm":
        if x.device.type == "cpu" or ids.numel() > most_pairs(x):
            return "the experts implementation 'batched_mm' is stock's beyond a few tokens on a GPU"
    elif asked != "grouped_mm":
        return f"the experts implementation {asked!r} is in force, and only 'grouped_mm' and 'batched_mm' are served"
    interface = sys.modules[_INTERFACE]
    if interface.ALL_EXPERTS_FUNCTIONS[asked] is not getattr(interface, f"{asked}_experts_forward"):
        return f"another function than transformers' own is registered as the experts implementation {asked!r}"
    if getattr(module, "_is_expert_parallel", False) or getattr(module, "_hf_tp_plan", None) is not None:
        return _SPREAD
    return None


def _unlike(module: Any, x: Tensor, tensors: dict[str, Any]) -> str | None:
    for name, tensor in tensors.items():
        if tensor is None and name.endswith("_bias"):
            continue
        if type(tensor) is not nn.Parameter or tensor.dtype != x.dtype or tensor.device != x.device:
            return f"{name} is not a plain parameter of the input's dtype on its device"
        if len(tensor) != getattr(module, "num_experts", len(tensor)):
            return _SPREAD
        if not torch.compiler.is_compiling() and tensor.data_ptr() % 16:
            return f"{name} doesn't start at a multiple of 16 bytes"
    return None


def _unserved(x: Tensor) -> str | None:
    if torch.is_autocast_enabled(x.device.type):
        return "under autocast the experts are stock's"
    if torch.compiler.is_compiling() and (x.dtype != torch.bfloat16 or exporting()):
        return "while torch.compile traces, experts are served in bf16 only"
    return None


def _applies_its_activation(module: Any) -> bool:
    """As transformers does unless told otherwise: act(gate) · up."""
    gate = getattr(type(module), "_apply_gate", None)
    return gate is None or (gate.__module__ == _INTERFACE and "_apply_gate" not in module.__dict__)


def _kept(module: Any, rows: Tensor) -> tuple[ops.Shuffled, ops.Shuffled] | None:
    """Shuffled copies, if the user granted memory for them and nothing is being traced."""
    return None if KEPT not in module.__dict__ or torch.compiler.is_compiling() else shuffled(module, rows)


def _named(module: Any, path: str) -> Any:
    """A parameter or child by its name, with dots; None if there is none."""
    *way, name = path.split(".")
    for step in way:
        module = module._modules[step]
    found = module._parameters.get(name)
    return module._modules.get(name) if found is None else found
