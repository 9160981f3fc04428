"""Copy weights through ordinary memory if copies from a mapped file to the GPU stall or take twice the memory.

transformers maps a checkpoint's files and copies each tensor from the mapping to its device. With some Linux kernels
the driver stalls for up to a second per copy, and on GPUs that share the host's memory the mapped pages are duplicated.
On machines with one of these faults (`hf_rocm.known_faults`), each tensor is first read into separate memory, and the
pages of a contiguous tensor are released from the mapping. The values don't change.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm import patches
from hf_rocm.architectures import KFD_NODES, gfx_of_node, system_file
from hf_rocm.known_faults import MappedCopyFault, mapped_copy_fault
from hf_rocm.patches import Change
from hf_rocm.weights.mmap_pages import release_pages

_log = logging.getLogger("hf_rocm")
_logged: set[str] = set()


class Machine(NamedTuple):
    """The facts that determine whether a fault is known. kernel: the output of `uname -r`. gpus: the architectures
    that the driver lists.
    """

    kernel: str
    gpus: tuple[str, ...]


def machine() -> Machine:
    """Describe this machine from files, without opening a GPU."""
    nodes = sorted(Path(KFD_NODES).glob("*/properties"))
    architectures = (gfx_of_node(text) for node in nodes if (text := system_file(str(node))))
    return Machine(platform.release(), tuple(gfx for gfx in architectures if gfx))


def fault() -> MappedCopyFault | None:
    """Return this machine's known fault in direct copies from a mapped file, or None."""
    return mapped_copy_fault(*machine())


@contextmanager
def where_needed() -> Iterator[None]:
    """If this machine has a fault, weights loaded within the block are copied through ordinary memory."""
    known = fault()
    if known is None:
        yield
        return
    if known.name not in _logged:
        _logged.add(known.name)
        _log.info("weights are copied through ordinary memory, not from a mapped file: %s (%s)", known.what, known.link)
    with patches.applied(Change(import_module("transformers.modeling_utils"), "safe_open", _open_through_heap)):
        yield


def _open_through_heap(change: Change) -> Callable[..., Any]:
    """Return a `safe_open` whose tensors have separate memory, except on MPS and for files that are not mapped."""

    def safe_open(filename: Any, framework: Any = "pt", device: Any = "cpu", **arguments: Any) -> Any:
        stock: Callable[..., Any] = change.original
        if not change.live or device == "mps" or arguments.get("backend", "mmap") != "mmap":
            return stock(filename, framework, device, **arguments)
        return _File(stock(filename, framework, "cpu", **arguments), device)

    return safe_open


class _Wrapper:
    """A proxy: attributes that it lacks are read from the wrapped object."""

    def __init__(self, wrapped: Any, device: Any) -> None:
        self._wrapped, self._device = wrapped, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def _in_own_memory(self, mapped: Tensor) -> Tensor:
        # contiguous even for a slice, so that only the copied part is read, and large copies occupy whole pages
        copy = mapped.clone(memory_format=torch.contiguous_format)
        if mapped.is_contiguous():
            release_pages(mapped)
        return copy if self._device == "cpu" else copy.to(self._device)


class _File(_Wrapper):
    """An open checkpoint file."""

    def __enter__(self) -> _File:
        self._wrapped.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._wrapped.__exit__(*error)

    def get_tensor(self, name: str) -> Tensor:
        return self._in_own_memory(self._wrapped.get_tensor(name))

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._wrapped.get_slice(name), self._device)


class _Slice(_Wrapper):
    """One tensor of the file, which is read when it is indexed."""

    def __getitem__(self, index: Any) -> Tensor:
        return self._in_own_memory(self._wrapped[index])
