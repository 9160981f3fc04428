"""Record streams on tensors that other streams use, so that the allocator does not reuse their memory too early.

PyTorch's allocator can immediately reuse the memory of a freed tensor for the stream on which it was allocated, even
while another stream still reads it, unless the other stream was recorded on the tensor. Threads pass caches and their
tensors to one another, and every thread may have its own current stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def record_current_stream(tensors: Iterable[Tensor]) -> None:
    """Record the current stream on these tensors, so that the allocator does not reuse their memory too early."""
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)  # the local part of a DTensor
        if local.is_cuda:
            local.record_stream(torch.cuda.current_stream(local.device))


def tensors_in(*roots: Any) -> Iterator[Tensor]:
    """Yield every tensor reachable from these objects: in containers and hf_rocm's objects, or attached to tensors."""
    pending, seen = list(roots), set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, (list, tuple, set)):
            pending += value
        elif isinstance(value, Tensor) or type(value).__module__.startswith("hf_rocm."):
            pending += getattr(value, "__dict__", {}).values()
