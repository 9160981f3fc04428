"""Memory that was taken on one stream and is used on another: the allocator must not give it away too early.

A tensor's memory belongs to the stream that it was made on. When it is let go, that stream may have it at once, though
another still works with it, unless PyTorch was told of the other. A cache goes from thread to thread with all that
belongs to it, and each thread may have a stream of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def used_here(tensors: Iterable[Tensor]) -> None:
    """Have the memory of these tensors, once it is let go, wait for what this thread's stream was given until then."""
    for each in tensors:
        own = getattr(each, "_local_tensor", each)  # of a DTensor
        if own.is_cuda:
            own.record_stream(torch.cuda.current_stream(own.device))


def tensors_in(*roots: Any) -> Iterator[Tensor]:
    """Every tensor that these objects of ours hold, in containers, in one another and attached to tensors."""
    pending, seen = list(roots), set()
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            yield each
        if isinstance(each, dict):
            pending += each.values()
        elif isinstance(each, (list, tuple, set)):
            pending += each
        elif isinstance(each, Tensor) or type(each).__module__.startswith("hf_rocm."):
            pending += getattr(each, "__dict__", {}).values()
