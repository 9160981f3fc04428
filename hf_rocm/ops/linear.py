"""linear: x Wᵀ + b.

The vendor library behind `F.linear` is the torch tier; aiter's tuned GEMMs come before it where they fit. Which
calls are PyTorch's whatever there is, and which product gets many rows or few, is decided here for every caller.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _get_tracing_state
from torch.autograd import forward_ad

from hf_rocm.errors import TierUnavailable
from hf_rocm.ops.aiter import linear as aiter
from hf_rocm.ops.aiter.detect import checked
from hf_rocm.ops.registry import Choice, Implementation, Operation, refuses_nothing, route
from hf_rocm.ops.triton import detect as triton_detect
from hf_rocm.ops.triton import linear as triton

# Up to so many rows a product reads more than it computes.
FEW = 16
MANY = 0  # in a specification: more than that


class LinearSpec(NamedTuple):
    """What the choice of a linear implementation depends on. k, n: a GEMM of [M, K] by [N, K]ᵀ."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    n: int
    k: int
    bias_dtype: torch.dtype | None
    contiguous: bool  # the weight
    grad: bool
    rows: int = 0  # M rounded up to a power of two, or MANY


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b.

    x: [..., K]; weight: [N, K]; bias: [N] or None; one dtype. Returns [..., N].
    """
    result: Tensor = route(_operation, specification(x, weight, bias), x, weight)(x, weight, bias)
    return result


def linear_by_aiter(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`, but a call that aiter can't serve raises `TierUnavailable`, unless gradients are the only reason."""
    *key, grad, _ = specification(x, weight, bias)
    reason = None if grad else aiter_refuses(_operation.choose((*key, grad, MANY)))  # as `choose` asked
    if reason is not None:
        raise TierUnavailable(
            "a linear layer was to run in aiter, which can't serve this call",
            facts={"x": f"{tuple(x.shape)} {x.dtype} on {x.device}", "weight": tuple(weight.shape), "reason": reason},
            hint="route with linear_backend='auto', or exclude this layer",
        )
    return linear(x, weight, bias)


def specification(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    """The fields of a `LinearSpec`, as the plain tuple that the router takes."""
    grad = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    n, k = weight.shape
    bias_dtype = None if bias is None else bias.dtype
    return (x.dtype, weight.dtype, x.device, n, k, bias_dtype, weight.is_contiguous(), grad, rows_class(x, k))


def choose(weight: Tensor, bias: Tensor | None) -> Choice[LinearSpec]:
    """What serves a layer with these weights, for many rows of their dtype and device without gradients."""
    with torch.no_grad():
        return _operation.choose((*specification(weight, weight, bias)[:-1], MANY))


def aiter_refuses(choice: Choice[LinearSpec]) -> str | None:
    """Why aiter doesn't serve a choice, or None if it does."""
    if choice.implementation.tier == "aiter":
        return None
    return "; ".join(each.reason for each in choice.refusals if each.tier == "aiter") or "another tier comes before it"


def is_pytorchs(x: Tensor) -> bool:
    """Whether a call is PyTorch's whatever kernels there are: autocast, function transforms, tracing, subclasses."""
    return (
        x.__class__ not in _PLAIN
        or torch.is_autocast_enabled(x.device.type)
        or torch._C._functorch.maybe_current_level() is not None
        or forward_ad._current_level >= 0
        or _get_tracing_state() is not None
    )


# torch 2.7 and up. Not is_exporting(): until 2.12 the compiler takes it for a constant True.
_TELLS_EXPORT = hasattr(torch.compiler, "_is_exporting_flag")


def exporting() -> bool:
    """Whether torch.export traces: its programs must not need hf_rocm."""
    return _TELLS_EXPORT and bool(torch.compiler._is_exporting_flag)


def rows(x: Tensor) -> int:
    """M of the product: how many rows x has."""
    return x.numel() // x.shape[-1] if x.shape[-1] else 0


def rows_class(x: Tensor, k: int) -> int:
    """The rows of x [..., K] as specifications tell them apart: up to a power of two, 0 for more than `FEW`."""
    m = x.numel() // k if k else 0
    return _CLASSES[m] if m <= FEW else 0


_CLASSES = tuple(1 << (m - 1).bit_length() if m else 0 for m in range(FEW + 1))


def eager_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The oracle: one matrix product and one sum."""
    product = torch.matmul(x, weight.t())
    return product if bias is None else product + bias


_PLAIN = (Tensor, torch.nn.Parameter)

_operation = Operation("linear", LinearSpec)
_operation.register(
    Implementation("aiter", "gemm_a16w16", aiter.refuses, aiter.linear, checked("linear", "gemm_a16w16"))
)
_operation.register(
    Implementation("triton", triton.NAME, triton.refuses, triton.linear, triton_detect.checked("linear", triton.NAME))
)
_operation.register(Implementation("torch", "F.linear", refuses_nothing, F.linear))
_operation.register(Implementation("eager", "matmul", refuses_nothing, eager_linear))
