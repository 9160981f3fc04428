"""act_and_mul: the gate of a gated MLP, act(gate) · up, on one [gate | up] tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rocm.device import Device
from hf_rocm.errors import OptionError
from hf_rocm.ops.aiter import activation as aiter
from hf_rocm.ops.aiter.detect import checked
from hf_rocm.ops.registry import Implementation, Operation, route


class ActivationSpec(NamedTuple):
    """What the choice of an activation depends on; dim is d, half of the last dim."""

    dtype: torch.dtype
    device: torch.device
    dim: int
    activation: str
    grad: bool


def act_and_mul(x: Tensor, *, activation: str) -> Tensor:
    """act(x[..., :d]) · x[..., d:].

    x: [..., 2d] floating, gate first. activation: `silu`, `gelu` (erf) or `gelu_tanh`. Returns [..., d].
    Shazeer 2020 (GLU variants). Raises `OptionError` on another activation.
    """
    if activation not in _TORCH:
        raise OptionError(f"act_and_mul has no activation {activation!r}", facts={"known": ", ".join(_TORCH)})
    grad = torch.is_grad_enabled() and x.requires_grad
    key = (x.dtype, x.device, x.shape[-1] // 2, activation, grad)
    result: Tensor = route(_operation, key, x)(x, activation)
    return result


def torch_act_and_mul(x: Tensor, activation: str) -> Tensor:
    """PyTorch's activation and a product: bit for bit what the unfused layers compute."""
    gate, up = x.chunk(2, dim=-1)
    return _TORCH[activation](gate) * up


def eager_act_and_mul(x: Tensor, activation: str) -> Tensor:
    """The oracle: the formula in at least fp32, rounded once at the end."""
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return (_FORMULAS[activation](gate) * up).to(x.dtype)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_TORCH: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh}

# Hendrycks and Gimpel 2016: the Gaussian error linear unit, exact and in its tanh approximation
_FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1.0 + torch.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1.0 + torch.erf(x * 0.5**0.5)),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + torch.tanh((2.0 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
}


def _refuses_nothing(spec: ActivationSpec, device: Device) -> str | None:
    return None


_operation = Operation("act_and_mul", ActivationSpec)
_operation.register(
    Implementation("aiter", "act_and_mul", aiter.refuses, aiter.act_and_mul, checked("act_and_mul", "act_and_mul"))
)
_operation.register(Implementation("torch", "F.silu/F.gelu", _refuses_nothing, torch_act_and_mul))
_operation.register(Implementation("eager", "formula", _refuses_nothing, eager_act_and_mul))
