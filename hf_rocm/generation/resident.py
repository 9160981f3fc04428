"""Tensors that stay in their place for as long as a cache lives, so that a recorded step may read them there.

A runner copies what changes with every step to where its recording reads it. Masks, lengths and positions that we
advance in place need no copy: their owner keeps them, and what is attached to the mask (the lengths that kernels take
instead) would be lost with one.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

_TOKEN = "_hf_rocm_resident"


class _Token:
    """One resident tensor's name: equal to itself alone."""


def settle(tensor: Tensor) -> Tensor:
    """Mark a tensor as resident: its memory is kept, and changes only in place. Returns it."""
    setattr(tensor, _TOKEN, _Token())
    return tensor


def resident(tensor: Tensor) -> Hashable | None:
    """What a recording's key holds in place of a resident tensor's form; None for every other tensor.

    A recording that holds the token must also hold the tensor itself, or the cache that it belongs to.
    """
    token: Hashable | None = getattr(tensor, _TOKEN, None)
    return token
