"""The experts of releases that keep them as a list of modules, stacked into one block without a second copy.

Up to transformers 4.57 a mixture has an `nn.ModuleList` of gated MLPs. Their weights are moved into two blocks that
`ops.experts` reads; each parameter keeps its identity, with a storage of its own over its part, and every call checks
them all. Whatever is done to a model after stacking, the worst outcome is that stock's loop runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_tracing_state
from torch.nn import Linear, Module, ModuleList, Parameter
from torch.nn.modules import module as torch_module

from hf_rocm.overlay import bind
from hf_rocm.weights.block import capturing, join_parameters, own_memory
from hf_rocm.weights.eligible import refusal

# In the module's __dict__: a `Stacked`; or, in a copy or an unpickled module, the names to stack at its next call.
STATE = "_hf_rocm_experts"

# The names of experts whose weights were replaced after stacking: stock's loop runs until the model is prepared again.
MOVED = "_hf_rocm_experts_moved"

LIST = "experts"  # the child that holds them

_MOVED = "the experts' weights were replaced or moved after stacking; hf_rocm.prepare(model) stacks them again"

_lock = threading.RLock()

_hooks_on_all = torch_module._global_forward_hooks
_pre_hooks_on_all = torch_module._global_forward_pre_hooks


class Stacked:
    """Live blocks. gate_up: [E, 2I, H], gate first; down: [E, H, I]; biases [E, 2I] and [E, H], or None.

    The rest is what the modules must still look like, in flat lists, so that checking hundreds of experts is a few
    passes over lists: experts, then for each of them the children named, then the weights and biases of the linears.
    """

    def __init__(self, module: Module, names: tuple[str, ...]) -> None:
        gate, up, down, _ = names
        self.names = names
        self.experts = list(_experts(module))
        pairs = [expert._modules[name] for expert in self.experts for name in (gate, up)]
        downs = [expert._modules[down] for expert in self.experts]
        count = len(self.experts)
        self.gate_up, self.gate_up_bias = _blocks(pairs, count)
        self.down, self.down_bias = _blocks(downs, count)
        self.slots = [(expert._modules, name) for expert in self.experts for name in names]
        self.children: list[Any] = [modules[name] for modules, name in self.slots]
        called: list[Any] = [*self.experts, *self.children]
        self.activation = self.children[len(names) - 1]
        self.own = [each.__dict__ for each in called]
        self.hooks = [each[kind] for each in self.own for kind in ("_forward_hooks", "_forward_pre_hooks")]
        self.classes = [type(each) for each in called]
        self.forwards = [each.get("forward") for each in self.own]
        linears = [each for each in self.children if type(each) is Linear]
        kinds = ("weight",) if self.gate_up_bias is None else ("weight", "bias")
        self.places = [(linear._parameters, kind) for linear in linears for kind in kinds]
        self.parameters: list[Any] = [parameters[kind] for parameters, kind in self.places]
        self.addresses = [parameter.data_ptr() for parameter in self.parameters]
        self.numbers = [parameter.numel() for parameter in self.parameters]
        self.class_forward = type(self.experts[0]).forward

    def __reduce__(self) -> tuple[object, ...]:
        # Copies and pickles carry the names alone, as builtins, which a process without hf_rocm can read too.
        return (tuple, (self.names,))


def stack(module: Module, names: Sequence[str]) -> str | None:
    """Stack the experts of module, in place. names: of an expert's gate, up and down layers, and of its activation.

    Returns None once they are stacked (also if they were), else the sentence that says why not; then no weight has
    changed. Memory peaks at one block above what it was.
    """
    names = tuple(names)
    with _lock, torch.no_grad():
        held = stacked(module)
        if held is None or held.names != names:
            reason = _refusal(module, names)
            if reason is not None:
                return reason
            if STATE in module.__dict__:
                unstack(module)
            _stack(module, names)
        _follow_moves(module)
        return None


def stacked(module: Module) -> Stacked | None:
    """The blocks that stand for the module's experts at this moment, or None: then stock's loop must run.

    Called in every forward. None while gradients are on and a weight requires them.
    """
    held = module.__dict__.get(STATE)
    if held is None:
        return None
    if held.__class__ is not Stacked:
        return _stack_copy(module)
    if _hooks_on_all or _pre_hooks_on_all or _get_tracing_state() is not None:
        return None
    experts = _experts(module)
    if len(experts) != len(held.experts) or not all(map(is_, experts, held.experts)):
        return _forget(module)
    if not all(map(is_, [modules.get(name) for modules, name in held.slots], held.children)):
        return None  # an adapter around a layer, say; it may be taken away again
    if any(held.hooks) or type(experts[0]).forward is not held.class_forward:
        return None
    if not all(map(is_, [own.get("forward") for own in held.own], held.forwards)):
        return None
    if not all(map(is_, map(type, held.experts + held.children), held.classes)):
        return None
    parameters = [its[kind] for its, kind in held.places]
    if not all(map(is_, parameters, held.parameters)):
        # torch.func lends plain tensors for one call; anything else is there to stay
        lent = any(type(each) is Tensor for each in parameters)
        return None if lent else _forget(module)
    if list(map(Tensor.data_ptr, parameters)) != held.addresses or list(map(Tensor.numel, parameters)) != held.numbers:
        return _forget(module)
    if not all(map(Tensor.is_contiguous, parameters)):
        return _forget(module)
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters):
        return None
    return held


def unstack(module: Module) -> None:
    """Give each parameter of the experts ordinary memory of its own again; values and objects stay."""
    with _lock:
        held = module.__dict__.pop(STATE, None)
        names = module.__dict__.pop(MOVED, ())
        if held is not None:
            names = held.names if isinstance(held, Stacked) else held
        if not names:
            return
        del held
        parameters = [each for each in _parameters(module, names) if type(each) is Parameter and not each.is_meta]
        for parameter in parameters:
            own_memory(parameter)
        if any(parameter.is_cuda for parameter in parameters):
            torch.cuda.empty_cache()


def why_not(module: Module, names: Sequence[str]) -> str | None:
    """Why these experts don't run stacked at this moment, in a sentence; None if they do. Changes nothing."""
    held = module.__dict__.get(STATE)
    reason = _refusal(module, tuple(names))
    if reason is not None:
        return reason
    if isinstance(held, tuple):
        return "this is a copy of a prepared model: its first call without gradients stacks its experts"
    if not isinstance(held, Stacked):
        return _MOVED if MOVED in module.__dict__ else "it was not prepared"
    if _hooks_on_all or _pre_hooks_on_all:
        return "forward hooks are registered on all modules"
    if [each.data_ptr() for each in _parameters(module, names)] != held.addresses:
        return _MOVED
    if torch.is_grad_enabled() and any(each.requires_grad for each in _parameters(module, names)):
        return "gradients are on and the weights require them: call the model under no_grad() or inference_mode()"
    return None


def members(module: Module) -> list[Module]:
    """The experts of module, and all modules in them."""
    return [each for expert in _experts(module) for each in expert.modules()]


def _experts(module: Module) -> list[Module]:
    listed = module._modules.get(LIST)
    return list(listed._modules.values()) if type(listed) is ModuleList else []


def _parameters(module: Module, names: Sequence[str]) -> list[Parameter]:
    linears = [expert._modules[name] for expert in _experts(module) for name in names[:3]]
    return [parameter for linear in linears if linear is not None for parameter in linear.parameters(recurse=False)]


def _refusal(module: Module, names: tuple[str, ...]) -> str | None:
    experts = _experts(module)
    if len(experts) < 2:
        return "there is no list of experts"
    gate, up, down, activation = names
    for index, expert in enumerate(experts):
        if type(expert) is not type(experts[0]):
            return f"experts 0 and {index} are of different classes"
        if expert._forward_hooks or expert._forward_pre_hooks:
            return f"expert {index} has a forward hook"
        if "forward" in expert.__dict__:
            return f"expert {index} has a forward of its own"
        function = expert._modules.get(activation)
        if function is None or type(function) is not type(experts[0]._modules[activation]):
            return f"the activation of expert {index} is not that of expert 0"
        if function._forward_hooks or function._forward_pre_hooks or "forward" in function.__dict__:
            return f"the activation of expert {index} was changed"
    if not getattr(type(experts[0]).forward, "__module__", "").startswith("transformers.models."):
        return f"{type(experts[0]).__name__}.forward was replaced"
    for group in ((gate, up), (down,)):
        joined: Any = Module()
        joined._modules = {
            f"{LIST}.{index}.{name}": each._modules.get(name) for index, each in enumerate(experts) for name in group
        }
        reason = refusal(joined, tuple(joined._modules))
        if reason is not None:
            return reason
    biased = {name: experts[0]._modules[name].bias is not None for name in (gate, down)}  # type: ignore[union-attr]
    return "only some of the layers have a bias" if len(set(biased.values())) > 1 else None


def _blocks(linears: Sequence[Any], count: int) -> tuple[Tensor, Tensor | None]:
    """The weights [E, N, K] and the biases [E, N] of these linears, N of all those of one expert."""
    weight = join_parameters([linear._parameters["weight"] for linear in linears]).unflatten(0, (count, -1))
    biases = [linear._parameters["bias"] for linear in linears]
    return weight, None if biases[0] is None else join_parameters(biases).unflatten(0, (count, -1))


def _stack(module: Module, names: tuple[str, ...]) -> None:
    module.__dict__.pop(MOVED, None)
    held = module.__dict__[STATE] = Stacked(module, names)
    if held.parameters[0].is_cuda:
        torch.cuda.empty_cache()  # the freed weights are too small for the next block


def _forget(module: Module) -> Stacked | None:
    """Let go of the blocks, and with them of their memory. Returns None: what is left of them."""
    held = module.__dict__.pop(STATE, None)
    if isinstance(held, Stacked):  # else another thread was first
        module.__dict__[MOVED] = held.names
    return None


def _stack_copy(module: Module) -> Stacked | None:
    """The first call of a copied or unpickled module stacks its experts again."""
    if capturing():
        return None
    with _lock:
        names = module.__dict__.get(STATE)
        if isinstance(names, tuple):
            if _refusal(module, names) is not None:
                del module.__dict__[STATE]
                module.__dict__[MOVED] = names
                return None
            if torch.is_grad_enabled() and any(each.requires_grad for each in _parameters(module, names)):
                return None
            with torch.no_grad():
                _stack(module, names)
            _follow_moves(module)
    return stacked(module)


def _follow_moves(module: Module) -> None:
    """Have `.to()`, `.half()` and the like stack again, for as long as the class is bound."""
    cls = type(module)
    if bind.binding_of(module) is not None and "_apply" not in cls.__dict__:
        bind.attach(cls, "_apply", _apply_and_stack(cls))


def _apply_and_stack(cls: type[Any]) -> Callable[..., Any]:
    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        held = self.__dict__.pop(STATE, None)
        names = held
        if isinstance(held, Stacked):
            names = held.names
            if [each.data_ptr() for each in _parameters(self, names)] != held.addresses:
                self.__dict__[MOVED] = names
                names = None
        del held  # its memory goes as the parameters leave it
        result = super(cls, self)._apply(*args, **kwargs)
        if names is not None:
            self.__dict__[STATE] = names
            with torch.no_grad():
                stacked(self)  # stacks, unless the weights are now on the meta device or shared
        return result

    return _apply
