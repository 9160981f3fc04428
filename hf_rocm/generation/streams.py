"""Tensors that several streams use: copies to the host, and memory that the allocator must not reuse too early.

PyTorch's allocator can immediately reuse the memory of a freed tensor for the stream on which it was allocated, even
while another stream still reads it, unless the other stream was recorded on the tensor. Threads pass caches and their
tensors to one another, and every thread may have its own current stream.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor


def record_current_stream(tensors: Iterable[Tensor]) -> None:
    """Record the current stream on these tensors, so that the allocator does not reuse their memory too early."""
    for tensor in tensors:
        # The local part of a DTensor.
        local = getattr(tensor, "_local_tensor", tensor)
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


class HostCopy:
    """A copy of a tensor in pinned memory, written on a second stream.

    Work queued on the current stream after `send` does not wait for the copy, and the copy does not wait for this work.
    On a GPU, a kernel that follows a copy on the same stream starts several microseconds later than one that follows
    another kernel. Call `read` before the tensor's memory is written again.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._copy = torch.zeros(shape, dtype=dtype, pin_memory=on_gpu)
        self._ready: Any = torch.cuda.Event() if on_gpu else None
        self._sent: Any = torch.cuda.Event() if on_gpu else None
        # A reference that keeps the tensor's memory allocated until the copy has ended.
        self._tensor: Tensor | None = None

    def send(self, tensor: Tensor) -> None:
        """Start copying a tensor of the same shape and dtype."""
        if self._sent is None:
            self._copy.copy_(tensor)
            return
        self._tensor = tensor
        stream = _copies(tensor.device)
        self._ready.record(torch.cuda.current_stream(tensor.device))
        stream.wait_event(self._ready)
        with torch.cuda.stream(stream):
            self._copy.copy_(tensor, non_blocking=True)
        self._sent.record(stream)

    def read(self) -> Tensor:
        """Return the copy, which the next `send` overwrites. Waits until it has been written."""
        if self._sent is not None:
            self._sent.synchronize()
        self._tensor = None
        return self._copy


class HostCopies:
    """One `HostCopy` for every shape of tensor. All tensors have the same dtype and are on the same device."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, ...], HostCopy] = {}

    def send(self, tensor: Tensor) -> HostCopy:
        """Start copying a tensor. The result is overwritten by the next tensor of this shape."""
        shape = tuple(tensor.shape)
        if shape not in self._copies:
            self._copies[shape] = HostCopy(shape, tensor.dtype, tensor.device)
        copy = self._copies[shape]
        copy.send(tensor)
        return copy


@cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """The stream of the copies from this device."""
    return separate_stream(device)


def separate_stream(device: torch.device) -> Any:
    """Return a new stream, which no other code uses if the runtime library can create it.

    PyTorch returns the streams of a pool in turn, so a program that creates many of them gets the same one again. If a
    thread of the program used the stream of recordings, its kernels would become part of another thread's recording.
    So the GPU's runtime library creates the stream. If that fails, the stream is one of PyTorch's, and is returned only
    once as long as PyTorch has enough of them.
    """
    with _handing_out:
        own = _created(device)
        if own is not None:
            return own
        for _ in range(_STREAMS):
            stream = torch.cuda.Stream(device)
            if stream not in _handed_out:
                break
        _handed_out.append(stream)
        return stream


# The number of streams in PyTorch's pool for a device.
_STREAMS = 32
_handed_out: list[Any] = []
_handing_out = threading.Lock()
# The flag of a stream that does not wait for the default stream. The streams of PyTorch's pool have it, too.
_NON_BLOCKING = 1


def _created(device: torch.device) -> Any:
    """Return a stream created by the runtime library, which is never destroyed; None if it can't be created."""
    runtime, prefix = _runtime(), "hip" if torch.version.hip else "cuda"
    create = getattr(runtime, f"{prefix}StreamCreateWithFlags", None)
    if create is None:
        return None
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        status = create(ctypes.byref(handle), ctypes.c_uint(_NON_BLOCKING))
        if status:
            # Otherwise PyTorch would report the error at its next kernel launch.
            getattr(runtime, f"{prefix}GetLastError")()
            return None
    return torch.cuda.ExternalStream(handle.value, device=device)


def _runtime() -> Any:
    """Return a library in which the functions of PyTorch's own CUDA or HIP runtime are found, or None.

    A process may have loaded other copies of the runtime, under any name. So a function is looked up in PyTorch's
    extension module and the libraries that it is linked to.
    """
    file = getattr(torch._C, "__file__", None)
    try:
        return None if file is None else ctypes.CDLL(file)
    except OSError:
        return None
