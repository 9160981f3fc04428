"""A shuffled weight that replaces the original: one copy in memory, in aiter's layout.

The module's parameter is then a tensor subclass that supports `F.linear` without gradients of weight and bias, queries
of its shape, dtype and device, and access to its gradient. Any other access (a state dict, an in-place write, `.data`,
`.to()`, merging an adapter) first restores and then uses the stock parameter, which is the same object with the same
bytes. Deep copies and pickles contain a stock parameter. So the shuffled layout is never visible.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakValueDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hf_rocm import ops
from hf_rocm.layers.grouped_linear import intact, live
from hf_rocm.layers.weight_group import PENDING, SLOT, Part, WeightGroup, idle, lock, register
from hf_rocm.ops.linear import left_to_pytorch
from hf_rocm.ops.shuffled import Shuffled, shuffle, unshuffle
from hf_rocm.weights import instance_forward, linear_hook
from hf_rocm.weights.eligible import accept_forward
from hf_rocm.weights.fuse import Fused
from hf_rocm.weights.fused_storage import part_memory


@register
class ShuffledLinear(WeightGroup):
    """A linear layer whose weight is shuffled in place."""

    order = 25

    def __init__(self, linear: nn.Module, weight: ShuffledWeight) -> None:
        assert weight.shuffled is not None
        self.linear_of = ref(linear)
        self.own_weight = weight
        self.shuffled = weight.shuffled
        self.sizes = (len(self.shuffled.data),)
        _by_data[self.shuffled.data.data_ptr()] = self

    @classmethod
    def form(cls, module: nn.Module, names: tuple[str, ...]) -> str | None:
        """Shuffle the weight of one linear layer, which must be eligible. names: empty."""
        replace(module)
        instance_forward.attach(module)
        return None

    @classmethod
    def restore(cls, module: nn.Module) -> None:
        group = module.__dict__.get(SLOT)
        if isinstance(group, ShuffledLinear):
            group.unshuffle(module)

    def linear(self, module: nn.Module, x: Tensor) -> Tensor | None:
        weight: Any = module._parameters.get("weight")
        if weight is self.own_weight:
            # The weight's class dispatches this call.
            return F.linear(x, weight, module._parameters.get("bias"))
        del module.__dict__[SLOT]
        return None

    def traced(self, module: nn.Module, x: Tensor) -> Tensor | None:
        weight, bias = cast(Tensor, module.weight), cast("Tensor | None", module.bias)
        if torch.is_grad_enabled():
            return F.linear(x, weight, bias)
        output: Tensor = torch.ops.hf_rocm.replaced_linear(x, self.shuffled.data, bias)
        return output

    def unshuffle(self, module: nn.Module) -> None:
        self.own_weight.stock()
        if module.__dict__.get(SLOT) is self:
            del module.__dict__[SLOT]
            linear_hook.release(module)

    def shuffled_data(self, module: nn.Module) -> Tensor | None:
        return self.shuffled.data if module._parameters.get("weight") is self.own_weight else None

    def nbytes(self, module: nn.Module) -> int:
        bias = module._parameters.get("bias")
        return self.shuffled.data.nbytes + (0 if bias is None else bias.nbytes)

    def __reduce__(self) -> tuple[object, ...]:
        return (bool, ())


class ShuffledWeight(nn.Parameter):
    """The parameter of a layer while its bytes are in aiter's layout."""

    shuffled: Shuffled | None
    original: nn.Parameter
    linear: ref[nn.Module]

    @staticmethod
    def __new__(cls, shuffled: Shuffled, original: nn.Parameter, linear: nn.Module) -> ShuffledWeight:
        data = shuffled.data
        weight: ShuffledWeight = Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=data.dtype, device=data.device, requires_grad=original.requires_grad
        )
        return weight

    def __init__(self, shuffled: Shuffled, original: nn.Parameter, linear: nn.Module) -> None:
        self.shuffled = shuffled
        self.original = original
        self.linear = ref(linear)

    def stock(self) -> nn.Parameter:
        """Restore and return the original parameter, with its values in plain order."""
        with lock:
            if self.shuffled is not None:
                with torch.inference_mode(False), torch.no_grad():
                    self.original.data = unshuffle(self.shuffled.data)
                self.shuffled = None
                linear = self.linear()
                if linear is not None:
                    _restore(linear, self)
        return self.original

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and len(args) > 1 and isinstance(args[1], ShuffledWeight):
            x, weight, bias = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias")
            if weight.shuffled is not None and not _trains(weight, bias):
                if left_to_pytorch(x):
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
        # C++ code that does not call __torch_function__ calls this method.
        return func(*tree_map(_stock, args), **tree_map(_stock, kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = self._plain()
        parameter: nn.Parameter = memo[id(self)]
        return parameter

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> nn.Parameter:
        """Return a stock parameter with the same values. This parameter stays shuffled."""
        if self.shuffled is None:
            return copy.deepcopy(self.original)
        with torch.inference_mode(False), torch.no_grad():
            return nn.Parameter(self.shuffled.plain(), requires_grad=self.original.requires_grad)


@register
class ShuffledGroup(WeightGroup):
    """The layers of a fused group, whose weights are parts of one shuffled matrix. bias: the joined biases, or None."""

    order = 20

    def __init__(self, whole: Shuffled, fused: Fused, parts: tuple[Part, ...]) -> None:
        self.whole, self.bias, self.parts = whole, fused.bias, parts
        self.names, self.sizes = fused.names, fused.sizes

    @classmethod
    def names_for(cls, module: nn.Module, binding: Any) -> tuple[str, ...]:
        group = module.__dict__.get(SLOT)
        is_group = isinstance(group, ShuffledGroup) and group.names == tuple(binding.fuses) and intact(module, group)
        return tuple(binding.fuses) if is_group else ()

    @classmethod
    def parameters(cls, module: nn.Module, names: Sequence[str]) -> list[Tensor | None]:
        return []

    @classmethod
    def form(cls, module: nn.Module, names: tuple[str, ...]) -> str | None:
        """Shuffle a live fused group as one matrix.

        Rows stay within their blocks of 16, so every layer's part of the result is also a shuffled weight.
        """
        with torch.no_grad():
            group = live(module)
        if isinstance(group, ShuffledGroup) and group.names == names:
            return None
        if not isinstance(group, Fused) or group.names != names:
            return "its layers don't run as one GEMM"
        del module.__dict__[SLOT]
        with torch.inference_mode(False), torch.no_grad():
            whole = shuffle(group.weight)
        parts, row = [], 0
        for part, size in zip(group.parts, group.sizes, strict=True):
            rows = whole.data[row : row + size]
            replace(part.layer(module), Shuffled(rows))
            instance_forward.attach(part.layer(module))
            forward = part.layer(module).__dict__.get("forward")
            parts.append(part._replace(forward=forward, weight=rows.data_ptr(), nbytes=rows.nbytes))
            row += size
        module.__dict__[SLOT] = ShuffledGroup(whole, group, tuple(parts))
        return None

    @classmethod
    def restore(cls, module: nn.Module) -> None:
        group = module.__dict__.get(SLOT)
        if isinstance(group, ShuffledGroup):
            names = group.names
            group.unshuffle(module)
            del group
            module.__dict__.pop(SLOT, None)
            part_memory(module, names)

    def linear(self, module: nn.Module, x: Tensor) -> Tensor | None:
        if left_to_pytorch(x) or (x.requires_grad and torch.is_grad_enabled()):
            return None
        return ops.shuffled_linear(x, self.whole, self.bias)

    def memory_of(self, parameter: Any) -> Tensor | None:
        shuffled = parameter.shuffled if isinstance(parameter, ShuffledWeight) else None
        return None if shuffled is None else shuffled.data

    def accepts(self, module: nn.Module, linear: nn.Module, name: str) -> bool:
        return accept_forward(self, linear, name)

    def forget(self, module: nn.Module) -> WeightGroup | None:
        self.unshuffle(module)
        return live(module)

    def suspend(self, module: nn.Module) -> bool:
        self.unshuffle(module)
        return False

    def unshuffle(self, module: nn.Module) -> None:
        """Restore the stock parameters of the group's layers. The next call fuses them."""
        with lock:
            if module.__dict__.get(SLOT) is not self:
                return
            module.__dict__[SLOT] = idle(Fused, PENDING, self.names)
        for part in self.parts:
            weight = getattr(part.layer(module), "_parameters", {}).get("weight")
            if isinstance(weight, ShuffledWeight):
                weight.stock()

    def shuffled_data(self, module: nn.Module) -> Tensor | None:
        return self.whole.data if intact(module, self) else None

    def nbytes(self, module: nn.Module) -> int:
        return self.whole.data.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __reduce__(self) -> tuple[object, ...]:
        return (tuple, (idle(Fused, PENDING, self.names),))


def replace(linear: nn.Module, shuffled: Shuffled | None = None) -> ShuffledWeight:
    """Shuffle the weight of an eligible layer in place. During the call, a second copy of this weight is in memory.

    shuffled: the weight, already shuffled as part of a larger matrix.
    """
    original: Any = linear._parameters["weight"]
    with lock, torch.inference_mode(False), torch.no_grad():
        weight = ShuffledWeight(shuffle(original.data) if shuffled is None else shuffled, original, linear)
        original.data = original.data.new_empty(0)
        linear._parameters["weight"] = weight
        linear.__dict__[SLOT] = ShuffledLinear(linear, weight)
    return weight


def replaced_linear(x: Tensor, data: Tensor, bias: Tensor | None) -> Tensor:
    """The operator of a compiled graph: run the layer in its current state, looked up by its shuffled weight."""
    group = _by_data.get(data.data_ptr())
    linear: Any = None if group is None else group.linear_of()
    if group is None or linear is None or linear._parameters.get("weight") is group.own_weight:
        return ops.shuffled_linear(x, Shuffled(data), bias)
    return F.linear(x, linear.weight, bias)


def _restore(linear: nn.Module, weight: ShuffledWeight) -> None:
    if linear._parameters.get("weight") is weight:
        linear._parameters["weight"] = weight.original
    if isinstance(linear.__dict__.get(SLOT), ShuffledLinear):
        del linear.__dict__[SLOT]
        linear_hook.release(linear)


def _stock(value: Any) -> Any:
    return value.stock() if isinstance(value, ShuffledWeight) else value


def _trains(weight: Tensor, bias: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad))


# Layers by the address of the shuffled bytes, because a compiled graph has no reference to the layer.
_by_data: WeakValueDictionary[int, ShuffledLinear] = WeakValueDictionary()


def _members(*names: str) -> frozenset[Any]:
    members = [getattr(Tensor, name) for name in names if hasattr(Tensor, name)]
    return frozenset(member if callable(member) else getattr(member, "__get__", member) for member in members)


# Frequent queries whose results do not depend on the layout. They must not restore the original parameter.
_ABOUT_SHAPE = _members(
    *("shape", "dtype", "device", "requires_grad", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized"),
    *("is_nested", "is_mkldnn", "is_leaf", "layout", "names", "ndim", "nbytes", "itemsize", "grad_fn"),
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "is_contiguous", "__len__"),
    *("is_floating_point", "is_complex", "is_inference"),
)
_grad: Any = Tensor.grad
_requires_grad: Any = Tensor.requires_grad
_ABOUT_GRADIENTS = frozenset([Tensor.requires_grad_, _requires_grad.__set__, _grad.__get__, _grad.__set__])

_library = linear_hook.operator("replaced_linear", replaced_linear)
