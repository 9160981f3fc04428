"""A shuffled copy in addition to the original weights, for GEMMs with many rows.

A copy can become stale. So every use compares the addresses and the version counters of the weights: after an in-place
write (`load_state_dict` without `assign`, an optimizer) the copy is updated before it is used, and after a move it is
dropped. Version counters miss writes through `.data`. PEFT merges adapters that way, but registers the layer again
first, which also drops the copy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.linear import Linear
from torch.utils.hooks import RemovableHandle

from hf_rocm import ops, patches
from hf_rocm.layers.weight_group import SLOT, WeightGroup, register
from hf_rocm.ops.captured import captured
from hf_rocm.ops.linear import rows
from hf_rocm.ops.shuffled import Shuffled, shuffle
from hf_rocm.patches import Entry
from hf_rocm.weights import instance_forward, linear_hook


@register
class ShuffledCopy(WeightGroup):
    """A shuffled copy of weights, used for `threshold` rows or more.

    The copy of a linear layer's weight is stored in the layer's slot, and that of a fused group's weight in the group.
    """

    order = 30

    def __init__(self, source: Tensor, weights: Sequence[Tensor], threshold: int) -> None:
        """source: [N, K], the concatenated rows of the weights (or the only weight itself)."""
        self.threshold = threshold
        # An inference tensor could not be updated later.
        with torch.inference_mode(False), torch.no_grad():
            self.source = source.detach()
            self.shuffled: Shuffled | None = shuffle(self.source)
        self._marks = _marks(weights)
        with _lock:
            _alive.add(self)
        _by_address[weights[0].data_ptr()] = self
        patches.apply(_hook, user=self)

    @classmethod
    def form(cls, module: nn.Module, names: tuple[str, ...], threshold: int = 0) -> str | None:
        """Make the copy of one linear layer's weight, which must be eligible. names: empty. threshold: rows."""
        weight: Any = module._parameters["weight"]
        module.__dict__[SLOT] = cls(weight, [weight], threshold)
        instance_forward.attach(module)
        return None

    @classmethod
    def restore(cls, module: nn.Module) -> None:
        group = module.__dict__.get(SLOT)
        if isinstance(group, ShuffledCopy):
            group.unshuffle(module)

    @classmethod
    def restore_model(cls, model: nn.Module) -> None:
        super().restore_model(model)
        for module in model.modules():
            clear_copied(module)
        unwatch()

    @property
    def sizes(self) -> tuple[int, ...]:  # type: ignore[override]
        return (len(self.source),)

    def linear(self, module: nn.Module, x: Tensor) -> Tensor | None:
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        if weight.__class__ is not nn.Parameter or _trained(bias):
            return None
        shuffled = self.serves(x, (weight,))  # type: ignore[arg-type]
        return None if shuffled is None else ops.shuffled_linear(x, shuffled, bias)

    def traced(self, module: nn.Module, x: Tensor) -> Tensor | None:
        if torch.is_grad_enabled():
            return None
        output: Tensor = torch.ops.hf_rocm.kept_linear(x, module.weight, module.bias)
        return output

    def unshuffle(self, module: nn.Module) -> None:
        self.drop()
        if module.__dict__.get(SLOT) is self:
            del module.__dict__[SLOT]
            linear_hook.release(module)

    def shuffled_data(self, module: nn.Module) -> Tensor | None:
        return None if self.shuffled is None else self.shuffled.data

    def nbytes(self, module: nn.Module) -> int:
        bias = module._parameters.get("bias")
        return self.extra_bytes(module) + (0 if bias is None else bias.nbytes)

    def extra_bytes(self, module: nn.Module) -> int:
        return 0 if self.shuffled is None else self.shuffled.data.nbytes

    def serves(self, x: Tensor, weights: Sequence[Tensor]) -> Shuffled | None:
        """Return the copy, updated if necessary, or None if the weights themselves must be used."""
        if self.shuffled is None or rows(x) < self.threshold:
            return None
        source = self.source
        if x.dtype != source.dtype or x.device != source.device:
            return None
        if captured(x) and not getattr(_watched, "counters", False):
            # A replay would not compare the counters.
            return None
        if torch.is_grad_enabled() and (x.requires_grad or any(weight.requires_grad for weight in weights)):
            return None
        marks = _marks(weights)
        if marks != self._marks:
            if [mark[:2] for mark in marks] != [mark[:2] for mark in self._marks]:
                self.drop()
                return None
            self.renew(marks)
        return self.shuffled

    def follows(self, weights: Sequence[Tensor]) -> bool:
        """Whether these are the weights that were copied, even if their values have changed."""
        return self.shuffled is not None and [mark[:2] for mark in _marks(weights)] == [m[:2] for m in self._marks]

    def renew(self, marks: tuple[tuple[int, int, int], ...] | None = None) -> None:
        """Update the copy with the current values of the weights."""
        if self.shuffled is not None:
            with torch.inference_mode(False), torch.no_grad():
                self.shuffled.data.copy_(shuffle(self.source).data)
            self._marks = marks or self._marks

    def drop(self, *, release: bool = True) -> None:
        """Free the copy, so that only the weights are used. release: also remove the hook from PyTorch if unused."""
        self.shuffled = None
        self.source = self.source.new_empty(0)
        if release:
            patches.release(self)

    def __reduce__(self) -> tuple[object, ...]:
        # A copied or unpickled layer has no shuffled weights until it is prepared.
        return (bool, ())


@contextmanager
def counters_watched() -> Iterator[None]:
    """Allow graph captures in the `with` block to use copies.

    A prefill compares the counters before recorded steps are replayed.
    """
    _watched.counters = True
    try:
        yield
    finally:
        _watched.counters = False


def in_use() -> bool:
    """Return whether this process has a copy, which a prompt must update if its weights have changed."""
    with _lock:
        return any(copy.shuffled is not None for copy in _alive)


def clear_copied(module: nn.Module) -> None:
    """Remove False from the slot of a copied or unpickled layer, and hf_rocm's forward if nothing else needs it."""
    if module.__dict__.get(SLOT) is False:
        del module.__dict__[SLOT]
        if type(module) is Linear:
            linear_hook.release(module)


class ExpertCopies:
    """Shuffled copies of gate_up [E, 2I, H] and down [E, H, I], for any number of tokens.

    weights: the parameters that form gate_up and down.
    """

    def __init__(self, blocks: tuple[Tensor, Tensor], weights: tuple[Sequence[Tensor], Sequence[Tensor]]) -> None:
        self._shapes = [block.shape for block in blocks]
        pairs = zip(blocks, weights, strict=True)
        self._copies = [ShuffledCopy(block.flatten(0, 1), parameters, 0) for block, parameters in pairs]

    @property
    def nbytes(self) -> int:
        return sum(0 if copy.shuffled is None else copy.shuffled.data.nbytes for copy in self._copies)

    def serve(self, x: Tensor, *weights: Sequence[Tensor]) -> tuple[Shuffled, Shuffled] | None:
        """Return the copies, updated if necessary, or None."""
        pair = []
        for copy, shape, parameters in zip(self._copies, self._shapes, weights, strict=True):
            shuffled = copy.serves(x, parameters)
            if shuffled is None:
                return None
            pair.append(Shuffled(shuffled.data.view(shape)))
        return pair[0], pair[1]

    def drop(self) -> None:
        for copy in self._copies:
            copy.drop()


def by_address(weight: Tensor) -> ShuffledCopy | None:
    """Return the copy of a weight, or None. Operators of a compiled graph have only the weight."""
    return _by_address.get(weight.data_ptr())


def _marks(weights: Sequence[Tensor]) -> tuple[tuple[int, int, int], ...]:
    return tuple((weight.data_ptr(), weight.nbytes, weight._version) for weight in weights)


_watched = threading.local()
# Guards additions to `_alive`, which must not occur while it is iterated.
_lock = threading.Lock()
_alive: WeakSet[ShuffledCopy] = WeakSet()
_by_address: WeakValueDictionary[int, ShuffledCopy] = WeakValueDictionary()


def unwatch() -> None:
    """Remove the hook from PyTorch's table unless a copy still needs it."""
    with _lock:
        copies = list(_alive)
    for copy in copies:
        if copy.shuffled is None:
            patches.release(copy)
    patches.sweep()


def _registered(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Drop the copy of a layer that is registered again, as in an adapter, or of a group whose layer is replaced."""
    if torch.compiler.is_compiling():
        # The compiler traces slices of a module list through this hook.
        return
    for copy in (
        getattr(module.__dict__.get(SLOT), "copy", None),
        None if child is None else child.__dict__.get(SLOT),
    ):
        if isinstance(copy, ShuffledCopy):
            # PyTorch is iterating over its table of hooks.
            copy.drop(release=False)


# The table that `register_module_module_registration_hook` writes to.
_hooks = torch_module._global_module_registration_hooks
_hook = Entry(_hooks, RemovableHandle(_hooks).id, lambda _: _registered)


def _trained(bias: Tensor | None) -> bool:
    return bias is not None and bias.requires_grad and torch.is_grad_enabled()


def _kept_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    copy = by_address(weight)
    shuffled = None if copy is None else copy.serves(x, (weight,))
    return ops.linear(x, weight, bias) if shuffled is None else ops.shuffled_linear(x, shuffled, bias)


_library = linear_hook.operator("kept_linear", _kept_linear)
