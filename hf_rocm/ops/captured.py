"""Whether an operation must run as if it were captured in a graph, where the host can't read tensors.

Some operations read a tensor on the host to choose a faster kernel, except while a graph is being recorded. An
uncaptured run that is compared with a recorded graph must not read tensors either, because another kernel would
round differently.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_thread = threading.local()


@contextmanager
def as_captured() -> Iterator[None]:
    """Within the block, operations of this thread run as if a graph were being recorded."""
    before = getattr(_thread, "on", False)
    _thread.on = True
    try:
        yield
    finally:
        _thread.on = before


def captured(x: Tensor) -> bool:
    """Whether an operation on this tensor is being recorded, or runs as if it were."""
    return getattr(_thread, "on", False) or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def in_captured_block() -> bool:
    """Whether this thread is inside an `as_captured` block."""
    return getattr(_thread, "on", False)
