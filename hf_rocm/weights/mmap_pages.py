"""Weights that are still mapped from a file: on the CPU, a weight is read from the checkpoint when it is first used.

Copying such weights while loading would read data that stock does not read, and keep it in memory twice: in the copy
and in the pages of the file. So they are fused at their first use, and the pages are released.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor

# A file with one word per page; see pagemap.rst in the kernel's documentation. Where it can't be read (not Linux, or a
# sandbox), no tensor counts as mapped.
_PAGEMAP = "/proc/self/pagemap"
_WORD = 8  # bytes
_OF_A_FILE, _SWAPPED, _PRESENT = 1 << 61, 1 << 62, -(1 << 63)

_DONTNEED = 4


def is_mapped(tensor: Tensor) -> bool:
    """Whether the first page of the tensor's memory is mapped from a file or was never accessed."""
    if tensor.device.type != "cpu" or not tensor.nbytes:
        return False
    words = _words(tensor.data_ptr() // mmap.PAGESIZE, 1)
    return words is not None and _clean(words)


def release_pages(tensor: Tensor) -> None:
    """Remove the file's pages that are entirely within this tensor from the process's memory.

    The values stay the same, because they are read from the file again if needed. Does nothing if a page was written to
    or does not belong to a file.
    """
    first = -(-tensor.data_ptr() // mmap.PAGESIZE)
    pages = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE - first
    if tensor.device.type != "cpu" or pages <= 0:
        return
    words, advise = _words(first, pages), _madvise()
    if words is not None and advise is not None and _clean(words):
        advise(first * mmap.PAGESIZE, pages * mmap.PAGESIZE, _DONTNEED)


def release_freed(nbytes: int) -> None:
    """Make the C library return freed memory to the system, after `nbytes` of weights were freed on the CPU.

    Otherwise the library keeps freed blocks of up to 32 MiB, which can add up to a second copy of the model. Does
    nothing for less than 1 MiB, or if the C library is not glibc.
    """
    trim = _trim()
    if nbytes >= _MIN_BYTES and trim is not None:
        trim(0)


_MIN_BYTES = 2**20


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """Return glibc's malloc_trim, or None if the C library is not glibc."""
    if not sys.platform.startswith("linux"):
        return None
    function: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return function


def _clean(words: Tensor) -> bool:
    """Whether no page is anonymous memory. A page of a private mapping becomes anonymous when it is written to."""
    present = (words & (_PRESENT | _SWAPPED)) != 0
    return not bool((present & ((words & _OF_A_FILE) == 0)).any())


def _words(page: int, count: int) -> Tensor | None:
    try:
        handle = os.open(_PAGEMAP, os.O_RDONLY)
    except OSError:
        return None
    try:
        words = os.pread(handle, count * _WORD, page * _WORD)
    except OSError:
        return None
    finally:
        os.close(handle)
    return torch.frombuffer(bytearray(words), dtype=torch.int64) if len(words) == count * _WORD else None


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise: Callable[[int, int, int], int] = function
    return madvise
