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
from hf_rocm.weights import kept, quantized, replaced, routed, sharded, traced
from hf_rocm.weights.block import Fused, capturing, held_elsewhere, intact, join, own_memory, part_memory
from hf_rocm.weights.colwise import is_sharded
from hf_rocm.weights.eligible import accepted_forward, refusal
from hf_rocm.weights.mapped import is_mapped

# In the module's __dict__: a `Fused`; or the names to fuse at its next call, in a copy and where reading the weights
# is left to that call.
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
    changed. Memory peaks at one block above what it was. Weights on the CPU that nothing reads there, or that are
    still the checkpoint's mapped file, are left to the first use of the group, or to the move to a GPU.
    """
    names = tuple(names)
    with _lock, torch.no_grad():
        if is_sharded(module, names):
            reason = sharded.fuse(module, names)
            if reason is None:
                _follow_moves(module)
            return reason
        if module.__dict__.get(STATE) == names and _can_wait(module, names):
            return refusal(module, names)
        held = fused(module)  # lets go of a block whose weights moved
        if held is None or held.names != names:
            reason = refusal(module, names)
            if reason is not None:
                return reason
            if held is not None:
                unfuse(module)
            if _can_wait(module, names):
                module.__dict__[STATE] = names
            else:
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
        return _fuse_pending(module)
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
        weight, bias = parameters.get("weight"), parameters.get("bias")  # FSDP1 takes them out
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


def product(module: Module, x: Tensor, *, norm: ops.Norm | None = None, activation: str | None = None) -> Tensor | None:
    """The outputs of the fused layers side by side, or None when the layers must be called.

    x: [..., K]. norm: of x, before. activation: the product is [gate | up], and act(gate) · up is returned. Returns
    [..., N_1 + N_2 + …], or half of it. When gradients are asked for, even of x alone, the layers are called.
    """
    if norm is not None or activation is not None:
        held = _alone(module, x)
        if held is not None:
            return ops.fused_linear(x, held.weight, held.bias, norm=norm, activation=activation)
        if norm is not None:
            x = ops.rms_norm(x, norm.weight, eps=norm.eps, one_plus=norm.one_plus)
    group = _product(module, x)
    if group is None:
        return None
    return group[0] if activation is None else ops.act_and_mul(group[0], activation=activation)


def project(
    module: Module, x: Tensor, *, norm: ops.Norm | None = None, head_dim: int | None = None
) -> tuple[Tensor, ...] | None:
    """`product`, split into the layers' own outputs: [..., N_i] each, views of one tensor.

    head_dim: of heads that x [B, S, K] is projected to; the outputs are then [B, N_i / head_dim, S, head_dim].
    """
    if norm is not None:
        held = _alone(module, x)
        if held is not None:
            return _parts(ops.fused_linear(x, held.weight, held.bias, norm=norm), held.sizes, head_dim)
        x = ops.rms_norm(x, norm.weight, eps=norm.eps, one_plus=norm.one_plus)
    group = _product(module, x)
    return None if group is None else _parts(*group, head_dim)


def _parts(joined: Tensor, sizes: tuple[int, ...], head_dim: int | None) -> tuple[Tensor, ...]:
    """The columns of each layer. A view costs the host more than 1 µs; Tensor.split, which is Python, twice that."""
    if head_dim is None:
        return joined.split_with_sizes(sizes, -1)
    heads = [size // head_dim for size in sizes]
    return joined.view((*joined.shape[:-1], sum(heads), head_dim)).transpose(1, 2).split_with_sizes(heads, 1)


def unfuse(module: Module) -> None:
    """Give each parameter of the group ordinary memory of its own again; values and objects stay."""
    with _lock:
        sharded.part(module)
        held = module.__dict__.pop(STATE, None)
        names = module.__dict__.pop(MOVED, ())
        if isinstance(held, Fused):
            names = held.names
        del held
        part_memory(module, names)


def why_not(module: Module, names: Sequence[str]) -> str | None:
    """Why this group's next call would not run fused, in a sentence; None if it would. Changes nothing."""
    if quantized.group_of(module) is not None or replaced.is_group(module, names):
        return None
    if is_sharded(module, names):
        return sharded.why_not(module, names)
    held = module.__dict__.get(STATE)
    reason = refusal(module, names)
    if reason is not None:
        return reason
    if not isinstance(held, (Fused, tuple)):
        return _MOVED if MOVED in module.__dict__ else "it was not prepared"
    if _hooks_on_all or _pre_hooks_on_all:
        return "forward hooks are registered on all modules"
    if isinstance(held, tuple):
        reason = _pending(module, names)
        if reason is not None:
            return reason
    elif not intact(module, held):
        return _MOVED
    if torch.is_grad_enabled() and _requires_grad(module, names):
        return "gradients are on and the weights require them: call the model under no_grad() or inference_mode()"
    return None


def _product(module: Module, x: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
    """The product and the sizes of its parts, or None when the layers must be called."""
    if torch.compiler.is_compiling():
        return traced.product(module, x, module.__dict__.get(STATE)) or quantized.product(module, x)
    if replaced.GROUP in module.__dict__:
        group = replaced.product(module, x)
        if group is not None:
            return group
    held = _serves(module, x)
    if held is None:
        return quantized.product(module, x)
    children: Any = module._modules
    backend = children[held.parts[0].name].__dict__.get(routed.BACKEND)
    if backend is not None and backend != "auto":
        return routed.multiply(x, held.weight, held.bias, backend), held.sizes
    if held.kept is None:
        return ops.linear(x, held.weight, held.bias), held.sizes
    weights = [children[name]._parameters["weight"] for name in held.names]
    return kept.product(x, held, weights), held.sizes


def _alone(module: Module, x: Tensor) -> Fused | None:
    """The block, where nothing else has a say in its product: no other form of the weights, no backend, no compiler."""
    if torch.compiler.is_compiling() or replaced.GROUP in module.__dict__:
        return None
    held = _serves(module, x)
    if held is None or held.kept is not None:
        return None
    children: Any = module._modules
    return held if children[held.parts[0].name].__dict__.get(routed.BACKEND) in (None, "auto") else None


def _serves(module: Module, x: Tensor) -> Fused | None:
    held = fused(module)
    if held is None:
        return _serves_shards(module, x)
    if x.requires_grad and torch.is_grad_enabled():
        return None
    if held.parts[0].forward is not None and x.device != held.weight.device:
        return None  # accelerate's hook brings x to the layer
    return held


def _serves_shards(module: Module, x: Tensor) -> Any:
    """The block of layers that are sharded over ranks: their input is a plain tensor that every rank has."""
    if sharded.STATE not in module.__dict__ or x.__class__ is not Tensor:
        return None
    return None if x.requires_grad and torch.is_grad_enabled() else sharded.live(module)


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
        _leave(module, held)
    return None


def _leave(module: Module, held: Fused) -> None:
    """Parameters that are still parts of a forgotten block move out: one of them would keep all of it."""
    if capturing():
        return
    for part in held.parts:
        linear: Any = module._modules.get(part.name)
        for label, address in (("weight", part.weight), ("bias", part.bias)) if type(linear) is Linear else ():
            parameter = linear._parameters.get(label)
            if type(parameter) is Parameter and parameter.data_ptr() == address and not held_elsewhere(parameter):
                own_memory(parameter)


def _fuse_pending(module: Module) -> Fused | None:
    """The first call of a copied or unpickled module, or of one that was left to it, fuses it."""
    if capturing():
        return None
    with _lock:
        names = module.__dict__.get(STATE)
        if isinstance(names, tuple):
            if refusal(module, names) is not None or _pending(module, names) is not None:
                return None
            if torch.is_grad_enabled() and _requires_grad(module, names):
                return None
            _join(module, names)
            _follow_moves(module)
    return fused(module)


def _pending(module: Module, names: Sequence[str]) -> str | None:
    """Why eligible layers aren't fused by the next call either."""
    if _waits_for_gpu(module, names):
        return "its weights are on the CPU, where the stock forward runs: moving the model to a GPU fuses them"
    linears: list[Any] = [module._modules[name] for name in names]
    if any(held_elsewhere(parameter) for linear in linears for parameter in linear.parameters()):
        return "other tensors lie in the memory of its weights (a state dict that is kept?): fused once they are gone"
    return None


def _can_wait(module: Module, names: Sequence[str]) -> bool:
    return _waits_for_gpu(module, names) or is_mapped(_first_weight(module, names))


def _waits_for_gpu(module: Module, names: Sequence[str]) -> bool:
    return bind.mode_of(module) == bind.GPU and _first_weight(module, names).device.type == "cpu"


def _first_weight(module: Module, names: Sequence[str]) -> Tensor:
    linear: Any = module._modules[names[0]]
    weight: Tensor = linear.weight
    return weight


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
        divided = sharded.take_out(self)
        held = self.__dict__.pop(STATE, None)
        names = held
        if isinstance(held, Fused):
            names = held.names if intact(self, held) else None
            if names is None:
                self.__dict__[MOVED] = held.names
                _leave(self, held)
        del held  # its memory goes as the parameters leave it
        result = super(cls, self)._apply(*args, **kwargs)
        if divided is not None and not _waits_for_gpu(self, divided):
            with _lock, torch.no_grad():
                sharded.fuse(self, divided)
        if names is not None:
            self.__dict__[STATE] = names
            with torch.no_grad():
                if refusal(self, names) is None and not _can_wait(self, names):
                    fused(self)
        return result

    return _apply
