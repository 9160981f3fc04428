"""The gated MLP, down(act(gate(x)) · up(x)), and the plain one, down(act(up(x)))."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, compiler, nn

from hf_rocm import ops
from hf_rocm.layers import grouped_linear
from hf_rocm.layers.norm import SEPARATE, PrenormResidual, can_fuse, is_plain, is_stock
from hf_rocm.ops.act import one_kernel
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.linear import left_to_pytorch
from hf_rocm.overlay.replacements import constant_in_traces

# The classes in transformers' ACT2FN: 4.53 uses torch's SiLU, later releases wrap it; PytorchGELUTanh is now GELUTanh.
_ACTIVATIONS = {
    ("torch.nn.modules.activation", "SiLU"): "silu",
    ("transformers.activations", "SiLUActivation"): "silu",
    ("transformers.activations", "GELUActivation"): "gelu",
    ("transformers.activations", "PytorchGELUTanh"): "gelu_tanh",
    ("transformers.activations", "GELUTanh"): "gelu_tanh",
}
# The activations that the stock code computes in several operations, with their names in `ops.act`.
_FORMULAS = {
    ("transformers.activations", "QuickGELUActivation"): "quick_gelu",
    ("transformers.activations", "NewGELUActivation"): "gelu_new",
}

# The original torch.nn.functional.gelu, which other code may have replaced.
_GELU = torch._C._nn.gelu


@dataclass(frozen=True)
class GatedMLP:
    """A gate and an up projection, which `prepare` fuses in this order, and a down projection.

    fuses: the names of gate and up. activation: the name of the activation's child module or attribute, or, if the
    model calls a function directly, its name in `ops.act_and_mul`. down: the name of the down projection.
    """

    fuses: tuple[str, str] = ("gate_proj", "up_proj")
    activation: str = "act_fn"
    down: str = "down_proj"

    def forward(
        self, module: Any, stock: Callable[..., Any], x: Tensor, fused: PrenormResidual | None = None
    ) -> Tensor:
        """Run the MLP. x: [..., hidden]. Returns [..., hidden].

        The stock forward runs if `grouped_linear.product` returns None, for example without fused weights.
        """
        function = child(module, self.activation)
        known = self.activation if function is None else activation_of(function)
        if fused is None:
            fused = PrenormResidual(None, None) if can_fuse(x) else SEPARATE
        if fused.one_kernel:
            product = grouped_linear.product(module, x, norm=fused.norm, activation=known)
        else:
            product = grouped_linear.product(module, x)  # [..., gate | up]
        if product is None:
            result: Tensor = stock(module, x)
            return result
        if known is None:
            product = activated(product, function)
        elif not fused.one_kernel:
            product = ops.act_and_mul(product, activation=known)
        down = child(module, self.down)
        output: Tensor = fused.last_gemm(down, product) if fused.one_kernel else down(product)
        return output


@dataclass(frozen=True)
class JoinedMLP:
    """An MLP whose gate and up are one matrix, `gate_up_proj`. activation: the name of the activation's module."""

    activation: str = "activation_fn"

    def forward(self, module: Any, stock: Callable[..., Any], x: Tensor) -> Tensor:
        """Run the MLP. x: [..., hidden]. Returns [..., hidden]."""
        joined = child(module, "gate_up_proj")(x)
        down: Tensor = child(module, "down_proj")(activated(joined, child(module, self.activation)))
        return down


@dataclass(frozen=True)
class PlainMLP:
    """An MLP without a gate. The fields are the names of its children."""

    up: str = "fc1"
    activation: str = "activation_fn"
    down: str = "fc2"

    def forward(self, module: Any, stock: Callable[..., Any], x: Tensor) -> Tensor:
        """Run the MLP. x: [..., hidden]. Returns [..., hidden]."""
        up = child(module, self.up)(x)
        function = child(module, self.activation)
        known = None if compiling() or compiler._is_compiling_flag else activation_of(function, _FORMULAS)
        if known is None or left_to_pytorch(up) or not one_kernel(up, known):
            value = function(up)
        else:
            value = ops.act(up, activation=known)
        output: Tensor = child(module, self.down)(value)
        return output


def child(module: Any, name: str) -> Any:
    """Return `module.name`: a submodule, or a function that is an attribute; None if there is neither.

    An attribute of the instance takes precedence over a submodule, as in Python.
    """
    own = module.__dict__
    if name in own:
        return own[name]
    submodule = own["_modules"].get(name)
    return getattr(module, name) if submodule is None and hasattr(type(module), name) else submodule


def activated(joined: Tensor, function: Any) -> Tensor:
    """Return act(gate) · up for joined [..., gate | up]. function: the activation, called if it can't be fused."""
    known = activation_of(function)
    if known is None:
        gate, up = joined.chunk(2, dim=-1)
        product: Tensor = function(gate) * up
        return product
    return ops.act_and_mul(joined, activation=known)


def activation_of(function: object, names: Mapping[tuple[str, str], str] = _ACTIVATIONS) -> str | None:
    """Return the name of this activation module in an operation, or None if the module must be called.

    names: the operation's names for activations, by (module, name) of their classes; by default those of
    `ops.act_and_mul`.
    """
    kind = type(function)
    name = names.get((kind.__module__, kind.__qualname__))
    if name is None or not isinstance(function, nn.Module):
        return None
    # transformers' GELU modules store a function as `act` when they are built; it may be a variant written in Python
    act = function.__dict__.get("act")
    if act is not None and (act.func if isinstance(act, partial) else act) is not _GELU:
        return None
    return name if is_plain(function) else None


@constant_in_traces
def looks_up(caller: type, key: str, name: str) -> bool:
    """Return whether ACT2FN[key], in the stock file of this class, is the activation that `ops` calls `name`.

    Used for forwards that look up their activation on every call.
    """
    registry = vars(sys.modules[caller.__module__]).get("ACT2FN")
    entry = dict.get(registry, key) if isinstance(registry, dict) else None
    if type(registry).__module__ != "transformers.activations" or not isinstance(entry, type):
        return False
    return _ACTIVATIONS.get((entry.__module__, entry.__qualname__)) == name and is_stock(entry)
