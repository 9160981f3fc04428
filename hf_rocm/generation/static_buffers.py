"""Tensors that keep their address for the lifetime of a cache, so that a recorded step can read them in place.

A runner copies the inputs of every step to the tensors that its recording reads. Masks, lengths and positions that are
advanced in place need no copy. A copy of a mask would also lose the attached lengths, which kernels read instead of the
mask.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

_TOKEN = "_hf_rocm_resident"


class _Token:
    """The identity of one resident tensor: equal only to itself."""


def settle(tensor: Tensor) -> Tensor:
    """Mark a tensor as resident: it keeps its memory and changes only in place. Returns the tensor."""
    setattr(tensor, _TOKEN, _Token())
    return tensor


def resident(tensor: Tensor) -> Hashable | None:
    """The token that represents a resident tensor in the key of a recording; None for every other tensor.

    A recording that references the token must also reference the tensor, or the cache that the tensor belongs to.
    """
    token: Hashable | None = getattr(tensor, _TOKEN, None)
    return token


def written(tensor: Tensor | None) -> bool:
    """Return whether a tensor has been written in place since it was created.

    Always False for None, and for inference tensors, which have no version counter.
    """
    return tensor is not None and not tensor.is_inference() and tensor._version != 0
