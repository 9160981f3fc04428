"""A shuffled copy beside the weights that it was made of, for products of many rows.

A copy can go stale, which the weights never do. So each use compares what PyTorch keeps with the weights, their
addresses and version counters: after an in-place write (a copying load_state_dict, an optimizer) the copy is made
anew before it is used, after a move it is dropped. A write through `.data` is counted nowhere; PEFT, which merges
adapters that way, registers the layer anew before it does, and that drops the copy as well.
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

from hf_rocm import ops
from hf_rocm.ops.linear import rows
from hf_rocm.ops.shuffled import Shuffled, shuffle

# In a linear's __dict__: a `Kept`, or a `Replaced` (see replaced.py); False in a copy, whose weights are plain.
SHUFFLED = "_hf_rocm_shuffled"

# In a module's __dict__: the block of its fused layers, which may hold a `Kept` too; fuse.py's STATE, which imports us.
FUSED = "_hf_rocm_fused"


class Kept:
    """A shuffled copy of weights that stay, used from `threshold` rows on."""

    def __init__(self, source: Tensor, weights: Sequence[Tensor], threshold: int) -> None:
        """source: [N, K], the weights' rows one after another (or the only weight itself)."""
        self.threshold = threshold
        with torch.inference_mode(False), torch.no_grad():  # else it could not be written to later
            self.source = source.detach()
            self.shuffled: Shuffled | None = shuffle(self.source)
        self._marks = _marks(weights)
        _alive.add(self)
        _by_address[weights[0].data_ptr()] = self
        _watch()

    @property
    def nbytes(self) -> int:
        return 0 if self.shuffled is None else self.shuffled.data.nbytes

    def serves(self, x: Tensor, weights: Sequence[Tensor]) -> Shuffled | None:
        """The copy as the weights are now, or None: then the weights themselves are to be used."""
        if self.shuffled is None or rows(x) < self.threshold:
            return None
        source = self.source
        if x.dtype != source.dtype or x.device != source.device:
            return None
        if x.is_cuda and torch.cuda.is_current_stream_capturing() and not getattr(_watched, "counters", False):
            return None  # a replay would not look at the counters
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
        """Whether these are still the weights it was made of, whatever is in them."""
        return self.shuffled is not None and [mark[:2] for mark in _marks(weights)] == [m[:2] for m in self._marks]

    def renew(self, marks: tuple[tuple[int, int, int], ...] | None = None) -> None:
        """Make the copy anew from what the weights hold now."""
        if self.shuffled is not None:
            with torch.inference_mode(False), torch.no_grad():
                self.shuffled.data.copy_(shuffle(self.source).data)
            self._marks = marks or self._marks

    def drop(self) -> None:
        """Give its memory back: the weights serve alone from here on."""
        self.shuffled = None
        self.source = self.source.new_empty(0)

    def __reduce__(self) -> tuple[object, ...]:
        return (bool, ())  # a copied or unpickled layer has no shuffled weights, until it is prepared


@contextmanager
def counters_watched() -> Iterator[None]:
    """Within, copies serve a capture too: every replay comes after a prompt, which compares the counters."""
    _watched.counters = True
    try:
        yield
    finally:
        _watched.counters = False


def product(x: Tensor, held: Any, weights: Sequence[Tensor]) -> Tensor:
    """The product of a block (`block.Fused`), through its shuffled copy where that serves.

    weights: the parameters that form the block. A block without a copy costs one attribute more.
    """
    kept = held.kept
    shuffled = None if kept is None else kept.serves(x, weights)
    if shuffled is None:
        return ops.linear(x, held.weight, held.bias)
    return ops.shuffled_linear(x, shuffled, held.bias)


def by_address(weight: Tensor) -> Kept | None:
    """The live copy of a weight: what an operator of a compiled graph has is the weight alone."""
    return _by_address.get(weight.data_ptr())


def _marks(weights: Sequence[Tensor]) -> tuple[tuple[int, int, int], ...]:
    return tuple((weight.data_ptr(), weight.nbytes, weight._version) for weight in weights)


_watched = threading.local()
_alive: WeakSet[Kept] = WeakSet()
_by_address: WeakValueDictionary[int, Kept] = WeakValueDictionary()
_handle: Any = None


def _watch() -> None:
    global _handle
    if _handle is None:
        _handle = torch_module.register_module_module_registration_hook(_registered)


def unwatch() -> None:
    """Take PyTorch's hook away once no copy is left."""
    global _handle
    if _handle is not None and not any(kept.shuffled is not None for kept in _alive):
        _handle.remove()
        _handle = None


def _registered(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """A layer got another place (the inside of an adapter), or a fused group another layer: its copy goes."""
    if torch.compiler.is_compiling():
        return  # the compiler traces slices of a module list through here
    for kept in (
        getattr(module.__dict__.get(FUSED), "kept", None),
        None if child is None else child.__dict__.get(SHUFFLED),
    ):
        if isinstance(kept, Kept):
            kept.drop()
    unwatch()
