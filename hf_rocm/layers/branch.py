"""What a decoder layer hands to its attention or MLP while few rows pass: an input that isn't normed yet.

The norm before, and the residual sum after, then ride along with the first and the last product of the branch. Only
modules that run our function and nothing else are handed one; whatever a user put into a model is called as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from hf_rocm import ops
from hf_rocm.ops.linear import is_pytorchs
from hf_rocm.overlay import bind
from hf_rocm.overlay.bind import Binding

TERMS = object()  # in the place of a norm's input: asks for its terms

_on_all = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


class Branch:
    """x: [B, S, K], to be normed by `norm`, if there is one. residual: [B, S, K], to be added to the branch's output,
    or None. added: whether it was."""

    __slots__ = ("added", "norm", "residual", "x")

    def __init__(self, x: Tensor, norm: ops.Norm | None, residual: Tensor | None) -> None:
        self.x, self.norm, self.residual = x, norm, residual
        self.added = residual is None

    def normed(self) -> Tensor:
        """The branch's input as stock layers take it."""
        norm = self.norm
        return self.x if norm is None else ops.rms_norm(self.x, norm.weight, eps=norm.eps, one_plus=norm.one_plus)

    def sum(self, output: Tensor) -> Tensor:
        """The branch's output with the residual, whoever is to add it."""
        return output if self.added or self.residual is None else self.residual + output

    def last_product(self, linear: Any, x: Tensor) -> Tensor:
        """linear(x) + residual, in one where nothing was done to that layer. x: [..., N]. Returns [..., K]."""
        if not _plain(linear):
            output: Tensor = linear(x)
            return output
        self.added = True
        parameters = linear._parameters
        return ops.fused_linear(x, parameters["weight"], parameters["bias"], residual=self.residual)


def by_stock(stock: Callable[..., Any], module: Any, branch: Branch, *args: Any, **arguments: Any) -> Any:
    """The stock forward, for a function of ours that was handed a branch and doesn't serve the call."""
    return stock(module, branch.normed(), *args, **arguments)


def runs_ours(module: Any, x: Tensor) -> Binding | None:
    """The binding whose function would run, and nothing else, if module were called with x."""
    binding = bind.binding_of(module)
    if binding is None or type(module).__dict__["forward"] is not binding.dispatcher or any(_on_all):
        return None
    own = module.__dict__
    mode = own.get(bind.MODE, binding.mode)
    if mode == bind.OFF or (mode == bind.GPU and not x.is_cuda):
        return None
    if "forward" in own or own.get("_compiled_call_impl") is not None:
        return None
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return None
    return binding


def norm_terms(module: Any, x: Tensor) -> ops.Norm | None:
    """The terms of a norm that would be called with x, or None where the module must be called itself."""
    binding = runs_ours(module, x)
    if binding is None:
        return None
    terms: ops.Norm | None = binding.replacement(module, binding.stock, TERMS)
    if terms is None or (not terms.one_plus and terms.weight.dtype != x.dtype):
        return None
    return terms


def rides_along(x: Tensor) -> bool:
    """Whether a layer should hand on branches: few rows, and kernels that take norms and sums along."""
    return ops.rides_along(x) and not is_pytorchs(x)


def _plain(linear: Any) -> bool:
    own = linear.__dict__
    if linear.__class__ is not nn.Linear or "forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return False
    parameters = own["_parameters"]
    bias = parameters.get("bias")
    return parameters.get("weight").__class__ is nn.Parameter and (bias is None or bias.__class__ is nn.Parameter)
