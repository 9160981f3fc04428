"""Linear layers that read the same input, run as one, without a second copy of their weights.

The module keeps a plain reference to the block that its parameters form parts of, and every call checks them against
it: whatever is done to a model after fusing, the worst outcome is that the layers run one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_tracing_state
from torch.nn import Linear, Module, Parameter
from torch.nn.modules import module as torch_module

from hf_rocm import ops
from hf_rocm.overlay import bind
from hf_rocm.weights import traced
from hf_rocm.weights.block import Fused, block_of, join, part_memory
from hf_rocm.weights.eligible import accepted_forward, refusal

# In the module's __dict__: a `Fused`; or, in a copy or an unpickled module, the names to fuse at its next call.
STATE = "_hf_rocm_fused"

# The names of a group whose weights were replaced after fusing: unfused until the model is prepared again.
MOVED = "_hf_rocm_moved"

_MOVED = "the weights were replaced or moved after fusing; hf_rocm.prepare(model) fuses them again"

# Checking takes no lock. Changing does: two threads may make the first call of a copy at the same time.
_lock = threading.RLock()

_hooks_on_all = torch_module._global_forward_hooks
_pre_hooks_on_all = torch_module._global_forward_pre_hooks


def fuse(module: Module, names: Sequence[str]) -> str | None:
    """Fuse these `nn.Linear` children of module, in order, in place.

    Returns None once they are fused (also if they were), else the sentence that says why not; then no weight has
    changed. Memory peaks at one block above what it was.
    """
    names = tuple(names)
    with _lock, torch.no_grad():
        held = fused(module)  # lets go of a block whose weights moved
        if held is None or held.names != names:
            reason = refusal(module, names)
            if reason is not None:
                return reason
            if held is not None:
                unfuse(module)
            _join(module, names)
        _follow_moves(module)
        return None


def fused(module: Module) -> Fused | None:
    """The block that stands for the module's group at this moment, or None: then its layers must be called.

    Called in every forward. None while gradients are on and a weight requires them.
    """
    own = module.__dict__
    held = own.get(STATE)
    if held is None:
        return None
    if held.__class__ is not Fused:
        return _fuse_copy(module)
    if _hooks_on_all or _pre_hooks_on_all or _get_tracing_state() is not None:
        return None
    gradients = torch.is_grad_enabled()
    children = own["_modules"]
    biased = held.bias is not None
    for name, forward, address, nbytes, bias_address in held.parts:
        linear = children.get(name)
        if linear.__class__ is not Linear:
            return _refused(module)
        its = linear.__dict__
        if its["_forward_hooks"] or its["_forward_pre_hooks"]:
            return _refused(module)
        if its.get("forward") is not forward and not _accept(module, linear, name):
            return _refused(module)
        parameters = its["_parameters"]
        weight, bias = parameters["weight"], parameters["bias"]
        if weight.__class__ is not Parameter:
            # torch.func lends plain tensors for one call; anything else is there to stay
            return None if weight.__class__ is Tensor else _forget(module)
        # nbytes and is_contiguous see a shortened or transposed view at the old address
        if weight.data_ptr() != address or weight.nbytes != nbytes or not weight.is_contiguous():
            return _forget(module)
        if gradients and weight.requires_grad:
            return None
        if biased:
            if bias.__class__ is not Parameter:
                return None if bias.__class__ is Tensor else _forget(module)
            if bias.data_ptr() != bias_address or not bias.is_contiguous():
                return _forget(module)
            if gradients and bias.requires_grad:
                return None
        elif bias is not None:
            return _forget(module)
    return held


def product(module: Module, x: Tensor) -> Tensor | None:
    """The outputs of the fused layers side by side, or None when the layers must be called.

    x: [..., K]. Returns [..., N_1 + N_2 + …]. When gradients are asked for, even of x alone, the layers are called.
    """
    if torch.compiler.is_compiling():
        group = traced.product(module, x, module.__dict__.get(STATE))
        return None if group is None else group[0]
    held = _serves(module, x)
    return None if held is None else ops.linear(x, held.weight, held.bias)


def project(module: Module, x: Tensor) -> tuple[Tensor, ...] | None:
    """`product`, split into the layers' own outputs: [..., N_i] each, views of one tensor."""
    if torch.compiler.is_compiling():
        group = traced.product(module, x, module.__dict__.get(STATE))
        return None if group is None else group[0].split(group[1], dim=-1)
    held = _serves(module, x)
    return None if held is None else ops.linear(x, held.weight, held.bias).split(held.sizes, dim=-1)


def unfuse(module: Module) -> None:
    """Give each parameter of the group ordinary memory of its own again; values and objects stay."""
    with _lock:
        held = module.__dict__.pop(STATE, None)
        names = module.__dict__.pop(MOVED, ())
        if isinstance(held, Fused):
            names = held.names
        del held
        part_memory(module, names)


def why_not(module: Module, names: Sequence[str]) -> str | None:
    """Why this group does not run fused at this moment, in a sentence; None if it does. Changes nothing."""
    held = module.__dict__.get(STATE)
    reason = refusal(module, names)
    if reason is not None:
        return reason
    if isinstance(held, tuple):
        return "this is a copy of a prepared model: its first call without gradients fuses it"
    if not isinstance(held, Fused):
        return _MOVED if MOVED in module.__dict__ else "it was not prepared"
    if _hooks_on_all or _pre_hooks_on_all:
        return "forward hooks are registered on all modules"
    if not _intact(module, held):
        return _MOVED
    if torch.is_grad_enabled() and _requires_grad(module, held.names):
        return "gradients are on and the weights require them: call the model under no_grad() or inference_mode()"
    return None


def _serves(module: Module, x: Tensor) -> Fused | None:
    held = fused(module)
    if held is None or (x.requires_grad and torch.is_grad_enabled()):
        return None
    if held.parts[0].forward is not None and x.device != held.weight.device:
        return None  # accelerate's hook brings x to the layer
    return held


def _join(module: Module, names: tuple[str, ...]) -> None:
    module.__dict__.pop(MOVED, None)
    module.__dict__[STATE] = join(module, names)


def _refused(module: Module) -> Fused | None:
    """A layer that someone touched is called. The block is kept for later unless a weight has left it (offload)."""
    held = module.__dict__.get(STATE)
    if isinstance(held, Fused):
        for part in held.parts:
            linear: Any = module._modules.get(part.name)
            if type(linear) is Linear:
                weight = linear._parameters.get("weight")
                if type(weight) is Parameter and weight.data_ptr() != part.weight:
                    return _forget(module)
    return None


def _forget(module: Module) -> Fused | None:
    """Let go of the block, and with it of its memory. Returns None: what is left of it."""
    held = module.__dict__.pop(STATE, None)
    if isinstance(held, Fused):  # else another thread was first
        module.__dict__[MOVED] = held.names
    return None


def _fuse_copy(module: Module) -> Fused | None:
    """The first call of a copied or unpickled module fuses it again."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return None
    with _lock:
        names = module.__dict__.get(STATE)
        if isinstance(names, tuple):
            if refusal(module, names) is not None:
                del module.__dict__[STATE]
                module.__dict__[MOVED] = names
                return None
            if torch.is_grad_enabled() and _requires_grad(module, names):
                return None
            _join(module, names)
            _follow_moves(module)
    return fused(module)


def _accept(module: Module, linear: Module, name: str) -> bool:
    """Whether an instance forward that came or went after fusing is harmless; if so it is the expected one from now."""
    if not accepted_forward(linear):
        return False
    with _lock:
        held = module.__dict__.get(STATE)
        if isinstance(held, Fused):
            forward = linear.__dict__.get("forward")
            held.parts = tuple(part._replace(forward=forward) if part.name == name else part for part in held.parts)
    return True


def _intact(module: Module, held: Fused) -> bool:
    """Whether the parameters are still parts of the block, whatever else keeps it from running."""
    linears: list[Any] = [module._modules.get(name) for name in held.names]
    if not all(type(linear) is Linear for linear in linears):
        return False
    weights = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return all(type(tensor) is Parameter for tensor in [*weights, *biases]) and block_of(weights, biases) is held


def _requires_grad(module: Module, names: Sequence[str]) -> bool:
    linears: list[Any] = [module._modules[name] for name in names]
    return any(parameter.requires_grad for linear in linears for parameter in linear.parameters())


def _follow_moves(module: Module) -> None:
    """Have `.to()`, `.half()` and the like fuse again, for as long as the class is bound."""
    cls = type(module)
    if bind.binding_of(module) is not None and "_apply" not in cls.__dict__:
        bind.attach(cls, "_apply", _apply_and_fuse(cls))


def _apply_and_fuse(cls: type[Any]) -> Callable[..., Any]:
    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        held = self.__dict__.pop(STATE, None)
        names = held
        if isinstance(held, Fused):
            names = held.names if _intact(self, held) else None
            if names is None:
                self.__dict__[MOVED] = held.names
        del held  # its memory goes as the parameters leave it
        result = super(cls, self)._apply(*args, **kwargs)
        if names is not None:
            self.__dict__[STATE] = names
            with torch.no_grad():
                fused(self)  # fuses, unless the weights are now on the meta device or shared
        return result

    return _apply
