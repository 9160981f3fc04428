"""fused_linear: x Wᵀ + b with what stands around it in a decoder layer, the norm, the gate and the residual sum.

With few rows a product waits for its weights alone, so a kernel that takes the rest along saves the launches of all of
it. Where there is none, the same operations run one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from hf_rocm import options
from hf_rocm.device import Device
from hf_rocm.errors import OptionError, TierUnavailable
from hf_rocm.ops.activation import act_and_mul, eager_act_and_mul
from hf_rocm.ops.linear import LinearSpec, eager_linear, linear, rows_class
from hf_rocm.ops.norm import eager_rms_norm, rms_norm
from hf_rocm.ops.registry import Implementation, Operation, operations, refuses_nothing, route
from hf_rocm.ops.triton import detect
from hf_rocm.ops.triton import linear as triton

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
BEFORE = ("user", "aiter")  # the tiers before ours


class Norm(NamedTuple):
    """The terms of an RMS norm; see `hf_rocm.ops.rms_norm`."""

    weight: Tensor
    eps: float
    one_plus: bool = False


class FusedLinearSpec(NamedTuple):
    """What the choice depends on. n, k: the weight's sizes; norm: that of its weight, and whether it is (1 + w)."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    n: int
    k: int
    bias_dtype: torch.dtype | None
    contiguous: bool  # the weight
    norm_dtype: torch.dtype | None
    one_plus: bool
    activation: str | None
    residual: bool
    grad: bool
    rows: int  # as in LinearSpec


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """rms_norm(x) Wᵀ + b, then the gate act(…) · …, then + residual; each part only if it is asked for.

    x: [..., K]; weight: [N, K]; bias: [N] or None. norm: of x. activation: `silu`, `gelu` or `gelu_tanh`: the product
    is [gate | up], and act(gate) · up leaves N / 2. residual: [..., N], in x's dtype. Each part is rounded as
    its own layer would. Returns [..., N] or [..., N / 2]. Raises `OptionError` on another activation.
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise OptionError(f"fused_linear has no activation {activation!r}", facts={"known": ", ".join(ACTIVATIONS)})
    norm_weight, eps, one_plus = (None, 0.0, False) if norm is None else norm
    grad = torch.is_grad_enabled() and _requires_grad(x, weight, bias, norm_weight, residual)
    n, k = weight.shape
    key = (
        x.dtype,
        weight.dtype,
        x.device,
        n,
        k,
        None if bias is None else bias.dtype,
        weight.is_contiguous(),
        None if norm_weight is None else norm_weight.dtype,
        one_plus,
        activation,
        residual is not None,
        grad,
        rows_class(x, k),
    )
    call = route(_operation, key, x, weight)
    result: Tensor = call(x, weight, bias, norm_weight, residual, eps, one_plus, activation)
    return result


def _requires_grad(*tensors: Tensor | None) -> bool:
    return any(each is not None and each.requires_grad for each in tensors)


def rides_along(x: Tensor) -> bool:
    """Whether a product of x takes norm, gate and residual sum along, as far as x alone can tell.

    x: [..., K]. False while torch.compile traces, which fuses them by itself, and where gradients are on.
    """
    if is_compiling() or torch.is_grad_enabled():
        return False
    k = x.shape[-1]
    few = rows_class(x, k)
    if not few:
        return False
    key = (x.dtype, x.dtype, x.device, k, k, None, True, None, False, None, True, False, few)
    try:
        return _operation.choose(key).implementation.tier == "triton"
    except TierUnavailable:  # a tier was named that can't: whoever multiplies is told so, in its own words
        return False


def composed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    one_plus: bool,
    activation: str | None,
) -> Tensor:
    """One operation after the other, each by what serves it: bit for bit what the separate layers compute."""
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps=eps, one_plus=one_plus)
    product = linear(x, weight, bias)
    if activation is not None:
        product = act_and_mul(product, activation=activation)
    return product if residual is None else residual + product


def eager_fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    one_plus: bool,
    activation: str | None,
) -> Tensor:
    """The oracle: the formulas, each rounded once."""
    if norm_weight is not None:
        x = eager_rms_norm(x, norm_weight, eps, one_plus)
    product = eager_linear(x, weight, bias)
    if activation is not None:
        product = eager_act_and_mul(product, activation)
    return product if residual is None else residual + product


def _triton_refuses(spec: FusedLinearSpec, device: Device) -> str | None:
    return triton.fused_refuses(spec, device) or _parts_elsewhere(spec, device)


def _parts_elsewhere(spec: FusedLinearSpec, device: Device) -> str | None:
    """Why one kernel must not stand for all parts: what the user named or registered for one of them, or aiter."""
    parts = {"linear": True, "rms_norm": spec.norm_dtype is not None, "act_and_mul": spec.activation is not None}
    for name in (name for name, there in parts.items() if there):
        named = options.current().tier(name)
        if named not in (None, "triton"):
            return f"the {named} tier was named for {name}"
        if any(each.tier == "user" for each in operations()[name].implementations):
            return f"{name} has an implementation that the user registered"
    return "aiter serves the product" if _preferred(spec, device) == "aiter" else None


def _preferred(spec: FusedLinearSpec, device: Device) -> str | None:
    """The tier that serves the product alone, if it is one that comes before ours."""
    linears = operations()["linear"]
    key = (spec.dtype, spec.weight_dtype, spec.device, spec.n, spec.k, spec.bias_dtype, spec.contiguous, spec.grad)
    alone = LinearSpec(*key, spec.rows)
    if any(each.tier in BEFORE and each.refuses(alone, device) is None for each in linears.implementations):
        tier = linears.choose(alone).implementation.tier
        return tier if tier in BEFORE else None
    return None


def _composed_in(tier: str) -> Implementation[FusedLinearSpec]:
    """The parts one by one, where this tier serves the product."""

    def refuses(spec: FusedLinearSpec, device: Device) -> str | None:
        return None if _preferred(spec, device) == tier else f"the {tier} tier doesn't serve the product"

    return Implementation(tier, "one by one", refuses, composed)


_operation = Operation("fused_linear", FusedLinearSpec, family="linear")
for _tier in BEFORE:
    _operation.register(_composed_in(_tier))
_operation.register(
    Implementation(
        "triton",
        triton.NAME,
        _triton_refuses,
        triton.fused_linear,
        detect.checked("fused_linear", triton.NAME),
    )
)
_operation.register(Implementation("torch", "one by one", refuses_nothing, composed))
_operation.register(Implementation("eager", "formulas", refuses_nothing, eager_fused_linear))
