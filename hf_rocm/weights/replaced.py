"""A shuffled weight in the place of the original: one copy in memory, in the order that aiter reads.

What stands in the module is a tensor of ours that computes `F.linear` and knows its shape. Whatever else is asked of
it (a state dict, an in-place write, `.data`, `.to()`, an adapter that merges) brings the stock parameter back first,
the same object with the same bytes, and is answered by that. So nobody ever sees rows in another order.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hf_rocm import ops
from hf_rocm.ops.linear import is_pytorchs
from hf_rocm.ops.shuffled import Shuffled, shuffle, unshuffle
from hf_rocm.weights.kept import FUSED, SHUFFLED

# In the module of a fused group: a `Group`, or in a copy of the module the names of its layers.
GROUP = "_hf_rocm_shuffled_group"

_lock = threading.RLock()


class Replaced:
    """The state of a linear layer whose weight is shuffled in place."""

    def __init__(self, linear: nn.Module, weight: ShuffledWeight) -> None:
        assert weight.shuffled is not None
        self.linear = ref(linear)
        self.weight = weight
        self.shuffled = weight.shuffled
        _by_data[self.shuffled.data.data_ptr()] = self

    @property
    def nbytes(self) -> int:
        return self.shuffled.data.nbytes

    def __reduce__(self) -> tuple[object, ...]:
        return (bool, ())


class ShuffledWeight(nn.Parameter):
    """The parameter of a layer while its bytes are in aiter's order."""

    shuffled: Shuffled | None
    original: nn.Parameter
    linear: ref[nn.Module]

    @staticmethod
    def __new__(cls, shuffled: Shuffled, original: nn.Parameter, linear: nn.Module) -> ShuffledWeight:
        data = shuffled.data
        made: ShuffledWeight = Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=data.dtype, device=data.device, requires_grad=original.requires_grad
        )
        return made

    def __init__(self, shuffled: Shuffled, original: nn.Parameter, linear: nn.Module) -> None:
        self.shuffled = shuffled
        self.original = original
        self.linear = ref(linear)

    def stock(self) -> nn.Parameter:
        """The original parameter, with its values in their own order, back in the layer that had it."""
        with _lock:
            if self.shuffled is not None:
                with torch.inference_mode(False), torch.no_grad():
                    self.original.data = unshuffle(self.shuffled.data)
                self.shuffled = None
                linear = self.linear()
                if linear is not None:
                    _put_back(linear, self)
        return self.original

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and len(args) > 1 and isinstance(args[1], ShuffledWeight):
            x, weight, bias = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias")
            if weight.shuffled is not None and not _trains(weight, bias):
                if is_pytorchs(x):
                    return F.linear(x, weight.shuffled.plain(), bias)
                return ops.shuffled_linear(x, weight.shuffled, bias)
        elif func in _ABOUT_SHAPE and args[0].shuffled is not None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        elif func in _ABOUT_GRADIENTS:
            if args[0].shuffled is not None:
                with torch._C.DisableTorchFunctionSubclass():
                    func(*args, **kwargs)
            return func(args[0].original, *args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*tree_map(_stock, args), **tree_map(_stock, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # what reaches a kernel without having passed above, from C++
        return func(*tree_map(_stock, args), **tree_map(_stock, kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = self._plain()
        made: nn.Parameter = memo[id(self)]
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> nn.Parameter:
        """A stock parameter with the same values; this one stays shuffled."""
        if self.shuffled is None:
            return copy.deepcopy(self.original)
        with torch.inference_mode(False), torch.no_grad():
            return nn.Parameter(self.shuffled.plain(), requires_grad=self.original.requires_grad)


class Group:
    """The layers of a fused group, each with a part of one shuffled matrix as its weight. bias: theirs, joined."""

    def __init__(self, names: tuple[str, ...], weights: Sequence[ShuffledWeight], whole: Shuffled, held: Any) -> None:
        self.names = names
        self.weights = tuple(weights)
        self.whole = whole
        self.bias: Tensor | None = held.bias
        self.biases = tuple(part.bias for part in held.parts)
        self.sizes: tuple[int, ...] = held.sizes

    def intact(self, module: nn.Module) -> bool:
        for name, weight, address in zip(self.names, self.weights, self.biases, strict=True):
            linear = module._modules.get(name)
            if linear.__class__ is not nn.Linear or weight.shuffled is None:
                return False
            its: Any = linear.__dict__
            bias = its["_parameters"]["bias"]
            if its["_parameters"]["weight"] is not weight or its["_forward_hooks"] or its["_forward_pre_hooks"]:
                return False
            if (None if bias is None else bias.data_ptr()) != address:
                return False
        return True

    def __reduce__(self) -> tuple[object, ...]:
        return (tuple, (self.names,))


def replace(linear: nn.Linear, shuffled: Shuffled | None = None) -> ShuffledWeight:
    """Put the weight of an eligible layer in aiter's order, in its place. Memory peaks at this one weight.

    shuffled: the weight, shuffled already, as part of a larger matrix.
    """
    original: Any = linear._parameters["weight"]
    with _lock, torch.inference_mode(False), torch.no_grad():
        weight = ShuffledWeight(shuffle(original.data) if shuffled is None else shuffled, original, linear)
        original.data = original.data.new_empty(0)
        linear._parameters["weight"] = weight
        linear.__dict__[SHUFFLED] = Replaced(linear, weight)
    return weight


def replace_group(module: nn.Module, names: tuple[str, ...], held: Any) -> None:
    """The same for the layers of a live block, whose whole stays one matrix: 16 rows at a time the order is theirs."""
    with torch.inference_mode(False), torch.no_grad():
        whole = shuffle(held.weight)
    weights, row = [], 0
    for name, size in zip(names, held.sizes, strict=True):
        linear: Any = module._modules[name]
        weights.append(replace(linear, Shuffled(whole.data[row : row + size])))
        row += size
    module.__dict__[GROUP] = Group(names, weights, whole, held)


def product(module: nn.Module, x: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
    """The outputs of a replaced group side by side, and their sizes; None when its layers must be called."""
    group = module.__dict__.get(GROUP)
    if group is None or torch.compiler.is_compiling() or is_pytorchs(x):
        return None
    if group.__class__ is tuple or not group.intact(module):
        break_up(module)
        return None
    if torch.is_grad_enabled() and (x.requires_grad or any(_trains(weight, None) for weight in group.weights)):
        return None
    return ops.shuffled_linear(x, group.whole, group.bias), group.sizes


def is_group(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether these layers form a shuffled group at this moment."""
    group = module.__dict__.get(GROUP)
    return isinstance(group, Group) and group.names == tuple(names) and group.intact(module)


def break_up(module: nn.Module) -> bool:
    """Forget a group: its layers have their stock parameters, which the next call fuses. Whether there was one."""
    group = module.__dict__.pop(GROUP, None)
    if isinstance(group, Group):
        for weight in group.weights:
            weight.stock()
        group = group.names
    if group is not None:
        module.__dict__.setdefault(FUSED, group)
    return group is not None


def replaced_linear(x: Tensor, data: Tensor, bias: Tensor | None) -> Tensor:
    """What an operator of a compiled graph runs: the layer as it is now, found by its shuffled weight."""
    held = _by_data.get(data.data_ptr())
    linear: Any = None if held is None else held.linear()
    if held is None or linear is None or linear._parameters.get("weight") is held.weight:
        return ops.shuffled_linear(x, Shuffled(data), bias)
    return F.linear(x, linear.weight, bias)


def _put_back(linear: nn.Module, weight: ShuffledWeight) -> None:
    from hf_rocm.weights import routed

    if linear._parameters.get("weight") is weight:
        linear._parameters["weight"] = weight.original
    if isinstance(linear.__dict__.get(SHUFFLED), Replaced):
        del linear.__dict__[SHUFFLED]
        routed.release(linear)


def _stock(value: Any) -> Any:
    return value.stock() if isinstance(value, ShuffledWeight) else value


def _trains(weight: Tensor, bias: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad))


# By the address of the shuffled bytes, which is all that a compiled graph has.
_by_data: WeakValueDictionary[int, Replaced] = WeakValueDictionary()


def _members(*names: str) -> frozenset[Any]:
    found = [getattr(Tensor, name) for name in names if hasattr(Tensor, name)]
    return frozenset(getattr(each, "__get__", each) if not callable(each) else each for each in found)


# What is the same in either order, and is asked often: it must not bring the original back.
_ABOUT_SHAPE = _members(
    *("shape", "dtype", "device", "requires_grad", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized"),
    *("is_nested", "is_mkldnn", "is_leaf", "layout", "names", "ndim", "nbytes", "itemsize", "grad_fn"),
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "is_contiguous", "__len__"),
    *("is_floating_point", "is_complex", "is_inference"),
)
_grad: Any = Tensor.grad
_requires_grad: Any = Tensor.requires_grad
_ABOUT_GRADIENTS = frozenset([Tensor.requires_grad_, _requires_grad.__set__, _grad.__get__, _grad.__set__])
