"""The forward of a linear layer that hf_rocm routes: an attribute of the instance, beside the stock class.

It is a bound method named as the stock one. A deepcopy binds it to the copy, and in a process without hf_rocm a
pickle has the stock forward there.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from hf_rocm import ops
from hf_rocm.ops.library import library_linear
from hf_rocm.ops.linear import exporting, is_pytorchs, linear_by_aiter
from hf_rocm.weights import kept as keeping
from hf_rocm.weights.kept import SHUFFLED, Kept
from hf_rocm.weights.replaced import Replaced, replaced_linear

# In a linear's __dict__, plain builtins: which backend it is routed to, and whether its own forward was found there.
BACKEND = "_hf_rocm_linear_backend"
_FOUND = "_hf_rocm_found_forward"

# accelerate's hook calls what it found as forward under this name.
_SLOTS = ("forward", "_old_forward")


def forward(self: Any, input: Tensor) -> Tensor:
    """nn.Linear's forward, through the shuffled weight and the backend that the layer has."""
    own = self.__dict__
    held, backend = own.get(SHUFFLED), own.get(BACKEND)
    if is_compiling():
        return _traced(self, input, held, backend)
    weight, bias = own["_parameters"].get("weight"), own["_parameters"].get("bias")
    if weight is None or is_pytorchs(input):
        return F.linear(input, self.weight, self.bias)
    if held:
        if held.__class__ is Replaced:
            if weight is held.weight:
                return F.linear(input, weight, bias)  # which the weight itself serves
            del own[SHUFFLED]
        elif weight.__class__ is nn.Parameter and not _trained(bias):
            shuffled = held.serves(input, (weight,))
            if shuffled is not None:
                return ops.shuffled_linear(input, shuffled, bias)
    if backend is None or weight.__class__ is not nn.Parameter:
        return F.linear(input, weight, bias)
    return multiply(input, weight, bias, backend)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    """`ops.linear` through one backend: `auto`, `aiter`, or one of PyTorch's libraries."""
    if backend == "auto":
        return ops.linear(x, weight, bias)
    if backend == "aiter":
        return linear_by_aiter(x, weight, bias)
    return library_linear(x, weight, bias, backend)


def attach(linear: Any) -> None:
    """Set the forward where it is called: on the instance, or behind accelerate's hook."""
    own = linear.__dict__
    if is_routed(linear):
        return
    slot = "_old_forward" if "_hf_hook" in own and "_old_forward" in own else "forward"
    if slot in own:
        own[_FOUND] = True  # the stock forward, see eligible.accepted_forward
    own[slot] = MethodType(forward, linear)


def release(linear: Any) -> None:
    """Take the forward away if nothing needs it any longer."""
    own = linear.__dict__
    if BACKEND in own or own.get(SHUFFLED):
        return
    own.pop(SHUFFLED, None)
    found = own.pop(_FOUND, False)
    for slot in _SLOTS:
        bound = own.get(slot)
        if is_ours(bound, linear) or (slot == "forward" and _is_unpickled(bound, linear)):
            if found:
                own[slot] = MethodType(nn.Linear.forward, linear)
            else:
                del own[slot]


def is_routed(linear: nn.Module) -> bool:
    """Whether a call of this layer comes to us."""
    return any(is_ours(linear.__dict__.get(slot), linear) for slot in _SLOTS)


def is_ours(function: object, linear: nn.Module) -> bool:
    return getattr(function, "__func__", None) is forward and getattr(function, "__self__", None) is linear


def _is_unpickled(function: object, linear: nn.Module) -> bool:
    """What a pickle makes of ours: the stock forward, bound."""
    return getattr(function, "__func__", None) is nn.Linear.forward and getattr(function, "__self__", None) is linear


def _trained(bias: Tensor | None) -> bool:
    return bias is not None and bias.requires_grad and torch.is_grad_enabled()


def _traced(self: Any, x: Tensor, held: object, backend: str | None) -> Tensor:
    """While torch.compile traces: operators that look at the layer's weights when they run."""
    if torch.is_autocast_enabled(x.device.type) or exporting():
        return F.linear(x, self.weight, self.bias)
    if isinstance(held, Replaced) and not torch.is_grad_enabled():
        replaced: Tensor = torch.ops.hf_rocm.replaced_linear(x, held.shuffled.data, self.bias)
        return replaced
    if isinstance(held, Kept) and not torch.is_grad_enabled():
        result: Tensor = torch.ops.hf_rocm.kept_linear(x, self.weight, self.bias)
        return result
    if backend is None or isinstance(held, Replaced):
        return F.linear(x, self.weight, self.bias)
    return multiply(x, self.weight, self.bias, backend)


def _kept_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    kept = keeping.by_address(weight)
    shuffled = None if kept is None else kept.serves(x, (weight,))
    return ops.linear(x, weight, bias) if shuffled is None else ops.shuffled_linear(x, shuffled, bias)


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_operators = torch.library.Library("hf_rocm", "FRAGMENT")
for _name, _function in (("kept_linear", _kept_linear), ("replaced_linear", replaced_linear)):
    _operators.define(f"{_name}(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    _operators.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hf_rocm::{_name}", _shape, lib=_operators)
