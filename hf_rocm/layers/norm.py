"""RMSNorm modules (Llama's, and Gemma's with 1 + w), and the norm and residual sum of a decoder layer's branch.

With few rows, a decoder layer calls hf_rocm's attention and MLP functions directly, with an input that is not yet
normalised and a `PrenormResidual`. Modules that a user hooked, wrapped or replaced never receive a
`PrenormResidual`.

For modules that no overlay binds, such as PyTorch's own norms and dropouts, `is_plain` determines whether they were
hooked, wrapped or replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

# Not from torch.nn, where the names may have been replaced.
from torch.nn.modules.dropout import Dropout
from torch.nn.modules.linear import Linear

from hf_rocm import ops
from hf_rocm.layers.grouped_linear import hooks_on_all, linears_are_pytorchs
from hf_rocm.layers.weight_group import PackedLinear
from hf_rocm.ops.linear import left_to_pytorch
from hf_rocm.overlay.replacements import constant_in_traces, unchanged, watches

_PLAIN = (nn.Parameter, torch.Tensor)
_hooks_on_all = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


@dataclass(frozen=True)
class RMSNorm:
    """A norm with a `weight` [D].

    eps: the name of the attribute with the epsilon. one_plus: the norm multiplies by (1 + weight), as in Gemma.
    """

    eps: str
    one_plus: bool = False

    def forward(self, module: Any, stock: Callable[..., Any], x: Tensor) -> Tensor:
        """x: [..., D]. Returns [..., D] as the stock forward would.

        Runs the stock forward if the weight is not a plain tensor (for example, if it is a DTensor). Without (1 + w),
        the stock forward also runs if the weight's dtype differs from that of x, because it then promotes the result.
        """
        weight = module._parameters.get("weight")
        if weight is None:
            # FSDP and parametrisations store it elsewhere.
            weight = module.weight
        if type(weight) not in _PLAIN or (not self.one_plus and weight.dtype != x.dtype):
            result: Tensor = stock(module, x)
            return result
        return ops.rms_norm(x, weight, eps=getattr(module, self.eps), one_plus=self.one_plus)

    def terms(self, module: Any, x: Tensor) -> ops.Norm | None:
        """Return the norm as an argument of operations that include it, or None if the module must be called."""
        weight = module.weight
        if type(weight) not in _PLAIN or (not self.one_plus and weight.dtype != x.dtype):
            return None
        return ops.Norm(weight, getattr(module, self.eps), self.one_plus)


class PrenormResidual:
    """The norm and the residual sum of a branch.

    norm: the RMS norm that is still to be applied to the branch's input, or None. residual: [B, S, K], to be added to
    the branch's output, or None. one_kernel: whether GEMM kernels include both. added: whether no sum is left to
    compute.
    """

    __slots__ = ("added", "norm", "one_kernel", "residual")

    def __init__(self, norm: ops.Norm | None, residual: Tensor | None, *, one_kernel: bool = True) -> None:
        self.norm, self.residual, self.one_kernel = norm, residual, one_kernel
        self.added = residual is None

    def normed(self, x: Tensor) -> Tensor:
        """Return x, the branch's input, normalised as stock layers expect it."""
        norm = self.norm
        return x if norm is None else ops.rms_norm(x, norm.weight, eps=norm.eps, one_plus=norm.one_plus)

    def sum(self, output: Tensor) -> Tensor:
        """Return the branch's output plus the residual, unless the last GEMM included it."""
        return output if self.added or self.residual is None else self.residual + output

    def last_gemm(self, linear: Any, x: Tensor) -> Tensor:
        """Return linear(x) + residual as one operation if linear is plain or an unhooked `PackedLinear`.

        Otherwise returns linear(x). x: [..., N] → [..., K]. Sets `added` if the result includes the residual.
        """
        if self.residual is not None and isinstance(linear, PackedLinear) and _is_unhooked(linear):
            self.added = True
            return linear.plus(x, self.residual)
        if not _is_plain_linear(linear):
            output: Tensor = linear(x)
            return output
        self.added = True
        parameters = linear._parameters
        return ops.fused_linear(x, parameters["weight"], parameters["bias"], residual=self.residual)

    def with_norm(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return the stock forward, preceded by the norm, for an overlay's function that does not serve the call."""
        return partial(_normed_stock, self, stock)


# For a direct call in which GEMMs include neither norm nor sum, for example one with many rows: the input is already
# normalised, and the layer adds the residual itself.
SEPARATE = PrenormResidual(None, None, one_kernel=False)


def can_fuse(x: Tensor) -> bool:
    """Return whether GEMMs of x can include the norm before them and the sum after them.

    This requires few rows, a kernel for them, and disabled gradients. False while torch.compile, torch.export or
    torch.jit traces, under autocast, a function transform or forward AD, and for a subclass of Tensor.
    """
    return ops.fused_linear_serves(x) and not left_to_pytorch(x)


def _normed_stock(
    fused: PrenormResidual, stock: Callable[..., Any], module: Any, x: Tensor, *args: Any, **kwargs: Any
) -> Any:
    return stock(module, fused.normed(x), *args, **kwargs)


def _is_unhooked(linear: Any) -> bool:
    own = linear.__dict__
    return not ("forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"] or hooks_on_all())


def _is_plain_linear(linear: Any) -> bool:
    own = linear.__dict__
    if linear.__class__ is not Linear or "forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return False
    if not linears_are_pytorchs():
        return False
    parameters = own["_parameters"]
    bias = parameters.get("bias")
    return parameters.get("weight").__class__ is nn.Parameter and (bias is None or bias.__class__ is nn.Parameter)


def is_plain(module: Any) -> bool:
    """Return whether a call of this module would only run the forward of its class, as the class's file defines it."""
    return runs_only_forward(module.__dict__) and is_stock(module.__class__)


def runs_only_forward(own: dict[str, Any]) -> bool:
    """Return whether a call of the module with this `__dict__` would only run the forward of its class.

    False if the module has hooks, its own forward or a compiled one, or if hooks are registered on all modules.
    """
    if "forward" in own or own.get("_compiled_call_impl") is not None:
        return False
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return False
    forward, forward_pre, backward, backward_pre = _hooks_on_all
    return not (forward or forward_pre or backward or backward_pre)


def dropout_reason(dropout: Any) -> str | None:
    """Return why a dropout module must be called, or None if its call would return its input unchanged."""
    if dropout.__class__ is not Dropout or not is_plain(dropout):
        return "its dropout was replaced or has hooks"
    return f"its dropout ({dropout.p}) is in training mode" if dropout.training and dropout.p else None


@constant_in_traces
def is_stock(kind: type) -> bool:
    """Like `replacements.unchanged`, with one fewer Python call, because every layer of an uncaptured step calls it."""
    watch = watches.get(kind)
    return unchanged(kind) if watch is None else watch.unchanged() or watch.holds()
