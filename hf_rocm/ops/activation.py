"""act_and_mul: the gate of a gated MLP, act(gate) · up, on one [gate | up] tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rocm.errors import OptionError
from hf_rocm.ops.aiter import activation as aiter
from hf_rocm.ops.aiter.detect import checked
from hf_rocm.ops.registry import Implementation, Operation, kernel_serves, refuses_nothing, route
from hf_rocm.ops.triton import activation as triton
from hf_rocm.ops.triton import detect as triton_detect

CLAMPED = "clamped_swiglu"


class ActivationSpec(NamedTuple):
    """What the choice of an activation depends on; dim is d, half of the last dim."""

    dtype: torch.dtype
    device: torch.device
    dim: int
    activation: str
    grad: bool
    interleaved: bool = False


def act_and_mul(
    x: Tensor, *, activation: str, interleaved: bool = False, limit: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """act(gate) · up, where gate is x[..., :d] and up is x[..., d:].

    x: [..., 2d] floating. interleaved: gate and up are side by side, x[..., ::2] and x[..., 1::2]. activation: `silu`,
    `gelu` (erf), `gelu_tanh`, or `clamped_swiglu`, which is (min(max(up, −limit), limit) + 1) · g · σ(alpha · g) with
    g = min(gate, limit), as in gpt-oss; limit and alpha are for that one alone. Returns [..., d].
    Shazeer 2020 (GLU variants). Raises `OptionError` on another activation.
    """
    if activation not in ACTIVATIONS:
        raise OptionError(f"act_and_mul has no activation {activation!r}", facts={"known": ", ".join(ACTIVATIONS)})
    key = _key(x, activation, interleaved)
    result: Tensor = route(_operation, key, x)(x, activation, interleaved, limit, alpha)
    return result


def one_kernel(x: Tensor, *, activation: str, interleaved: bool = False) -> bool:
    """Whether a kernel does all of `act_and_mul` at once, for operations that have it within."""
    return kernel_serves(_operation, _key(x, activation, interleaved))


def _key(x: Tensor, activation: str, interleaved: bool) -> tuple[object, ...]:
    grad = torch.is_grad_enabled() and x.requires_grad
    return (x.dtype, x.device, x.shape[-1] // 2, activation, grad, interleaved)


def torch_act_and_mul(x: Tensor, activation: str, interleaved: bool, limit: float, alpha: float) -> Tensor:
    """PyTorch's activation and a product: bit for bit what the unfused layers compute."""
    gate, up = _parts(x, interleaved)
    if activation == CLAMPED:
        return _clamped(gate, up, limit, alpha)
    return _TORCH[activation](gate) * up


def eager_act_and_mul(
    x: Tensor, activation: str, interleaved: bool = False, limit: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """The oracle: the formula in at least fp32, rounded once at the end."""
    gate, up = _parts(x.to(torch.promote_types(x.dtype, torch.float32)), interleaved)
    if activation == CLAMPED:
        return _clamped(gate, up, limit, alpha).to(x.dtype)
    return (_FORMULAS[activation](gate) * up).to(x.dtype)


def _parts(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    gate, up = x.chunk(2, dim=-1)
    return gate, up


def _clamped(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_TORCH: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh}
ACTIVATIONS = (*_TORCH, CLAMPED)

# Hendrycks and Gimpel 2016: the Gaussian error linear unit, exact and in its tanh approximation
_FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1.0 + torch.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1.0 + torch.erf(x * 0.5**0.5)),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + torch.tanh((2.0 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
}


_operation = Operation("act_and_mul", ActivationSpec)
_operation.register(
    Implementation("aiter", "act_and_mul", aiter.refuses, aiter.act_and_mul, checked("act_and_mul", "act_and_mul"))
)
_operation.register(
    Implementation(
        "triton",
        "act_and_mul_kernel",
        triton.refuses,
        triton.act_and_mul,
        triton_detect.checked("act_and_mul", "act_and_mul_kernel"),
    )
)
_operation.register(Implementation("torch", "F.silu/F.gelu", refuses_nothing, torch_act_and_mul))
_operation.register(Implementation("eager", "formula", refuses_nothing, eager_act_and_mul))
