"""The forward of a linear layer that hf_rocm routes, or whose weight is shuffled. See `instance_forward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.linear import Linear

from hf_rocm import ops
from hf_rocm.layers.grouped_linear import linears_are_pytorchs
from hf_rocm.layers.weight_group import SLOT
from hf_rocm.ops.blas_backend import library_linear
from hf_rocm.ops.linear import exporting, left_to_pytorch, linear_by_aiter
from hf_rocm.weights import instance_forward

# A key in a linear layer's __dict__. Its value, a string, is the backend to which the layer is routed.
BACKEND = "_hf_rocm_linear_backend"

# The backend of a model's output head: hf_rocm's kernel for few rows, and PyTorch for all other calls.
FEW_ROWS = "few rows"


def forward(self: Any, input: Tensor) -> Tensor:
    """nn.Linear's forward through the layer's shuffled weight or backend, if it has one."""
    own = self.__dict__
    group, backend = own.get(SLOT), own.get(BACKEND)
    if self.__class__ is not Linear and type(self).forward is not Linear.forward:
        output: Tensor = type(self).forward(self, input)
        return output
    if not linears_are_pytorchs():
        return Linear.forward(self, input)
    if is_compiling():
        return _traced(self, input, group, backend)
    weight, bias = own["_parameters"].get("weight"), own["_parameters"].get("bias")
    if weight is None or left_to_pytorch(input):
        return F.linear(input, self.weight, self.bias)
    if group:
        joined: Tensor | None = group.linear(self, input)
        if joined is not None:
            return joined
    if backend is None or weight.__class__ is not nn.Parameter:
        return F.linear(input, weight, bias)
    return multiply(input, weight, bias, backend)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    """Compute `ops.linear` with one backend: `FEW_ROWS`, `auto`, `aiter`, or one of PyTorch's libraries."""
    if backend == FEW_ROWS:
        return ops.linear(x, weight, bias) if ops.fused_linear_serves(x) else F.linear(x, weight, bias)
    if backend == "auto":
        return ops.linear(x, weight, bias)
    if backend == "aiter":
        return linear_by_aiter(x, weight, bias)
    return library_linear(x, weight, bias, backend)


def release(linear: nn.Module) -> None:
    """Remove the forward if no route or shuffled weight needs it."""
    own = linear.__dict__
    if BACKEND in own or own.get(SLOT):
        return
    own.pop(SLOT, None)
    instance_forward.detach(linear)


instance_forward.declare(Linear, forward)


def _traced(self: Any, x: Tensor, group: Any, backend: str | None) -> Tensor:
    """The forward while torch.compile traces, with operators that check the layer's weights at run time.

    Under autocast and torch.export, it is `F.linear`. The backend `FEW_ROWS` has no effect.
    """
    if torch.is_autocast_enabled(x.device.type) or exporting():
        return F.linear(x, self.weight, self.bias)
    output: Tensor | None = group.traced(self, x) if group else None
    if output is not None:
        return output
    if backend is None or backend == FEW_ROWS:
        return F.linear(x, self.weight, self.bias)
    return multiply(x, self.weight, self.bias, backend)


def operator(name: str, function: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> torch.library.Library:
    """Define `hf_rocm::name(x, weight, bias)`, a GEMM for compiled graphs.

    The caller must keep the returned library alive.
    """
    library = torch.library.Library("hf_rocm", "FRAGMENT")
    library.define(f"{name}(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hf_rocm::{name}", _shape, lib=library)
    return library


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
