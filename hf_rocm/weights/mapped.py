"""Weights that are still a mapped file: on the CPU, transformers leaves reading the checkpoint to their first use.

Copying them at loading time would read everything that stock doesn't, and keep it twice: in the copy, and in the pages
of the file that were read for it. So they are fused when they are used, and those pages are given back.
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

# One word a page; see pagemap.rst in the kernel's documentation. Absent (not Linux, a sandbox): nothing counts as
# mapped.
_PAGEMAP = "/proc/self/pagemap"
_WORD = 8  # bytes
_OF_A_FILE, _SWAPPED, _PRESENT = 1 << 61, 1 << 62, -(1 << 63)

_DONTNEED = 4


def is_mapped(tensor: Tensor) -> bool:
    """Whether the memory is a file's, or was never touched, going by its first page."""
    if tensor.device.type != "cpu" or not tensor.nbytes:
        return False
    words = _words(tensor.data_ptr() // mmap.PAGESIZE, 1)
    return words is not None and _clean(words)


def give_back(tensor: Tensor) -> None:
    """Take the file's pages that lie wholly in this tensor out of the process's memory.

    Its values stay what they are: read again, they come from the file. Nothing happens where a page was written to,
    or is no file's.
    """
    first = -(-tensor.data_ptr() // mmap.PAGESIZE)
    pages = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE - first
    if tensor.device.type != "cpu" or pages <= 0:
        return
    words, advise = _words(first, pages), _madvise()
    if words is not None and advise is not None and _clean(words):
        advise(first * mmap.PAGESIZE, pages * mmap.PAGESIZE, _DONTNEED)


def release_freed(nbytes: int) -> None:
    """After so many bytes of weights were freed on the CPU: have the C library return them to the system.

    It keeps blocks of up to 32 MB for later, where they would add up to a second model.
    """
    trim = _trim()
    if nbytes >= _WORTH and trim is not None:
        trim(0)


_WORTH = 2**20


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """glibc's alone."""
    if not sys.platform.startswith("linux"):
        return None
    function: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return function


def _clean(words: Tensor) -> bool:
    """No page of anonymous memory: a private mapping's page becomes one when it is written to."""
    here = (words & (_PRESENT | _SWAPPED)) != 0
    return not bool((here & ((words & _OF_A_FILE) == 0)).any())


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
    found: Callable[[int, int, int], int] = function
    return found
