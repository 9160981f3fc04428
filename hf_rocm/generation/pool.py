"""Caches between two calls: kept with their recordings, so that the next call of the same size records nothing.

A cache is handed to one call at a time, whichever thread makes it: who streams starts a thread for every call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hf_rocm import options
from hf_rocm.generation.cache import DecodeCache, bucket
from hf_rocm.generation.inputs import residents_of
from hf_rocm.generation.streams import tensors_in, used_here
from hf_rocm.weights.budget import in_bytes

# However small they are.
_MOST = 8

# A call is not given a cache more than so many times its size: attention may have to look at all of it.
_FACTOR = 2

# Tokens that a new cache has room for beyond the prompt; it grows if a call comes that far.
_AHEAD = 1024


class _Idle(NamedTuple):
    """A cache, the stream of its last call, and an event behind all that was queued there; None on a CPU."""

    cache: DecodeCache
    stream: Any
    used: Any

    @property
    def elsewhere(self) -> bool:
        """Whether this thread's stream is another one."""
        return self.stream is not None and bool(torch.cuda.current_stream(self.stream.device) != self.stream)


class Pool:
    """The idle caches of one model, the one that was used last at the end."""

    def __init__(self) -> None:
        self._idle: list[_Idle] = []
        self._lock = threading.Lock()

    def take(self, windows: Sequence[int | None], *, batch: int, prompt: int, limit: int) -> DecodeCache:
        """A cache for a call: an idle one of that size, emptied, or a new one.

        windows: of the layers. prompt, limit: the tokens of a row now, and at most in the end.
        """
        needed = min(prompt + _AHEAD, limit) + 1
        with self._lock:
            fitting = [each for each in self._idle if _serves(each.cache, windows, batch, needed)]
            if not fitting:
                return DecodeCache(windows, capacity=bucket(needed), limit=limit)
            found = min(fitting, key=lambda each: (each.elsewhere, each.cache.capacity))
            self._idle.remove(found)
        cache = found.cache
        if found.elsewhere:
            found.used.wait(torch.cuda.current_stream(found.stream.device))
            used_here(tensors_in(cache, residents_of(cache)))
        cache.reset()
        cache.limit = limit
        return cache

    def give(self, cache: DecodeCache) -> None:
        """Keep a cache for the next call, within the bounds; older ones go first."""
        device = None if cache.layers[0].keys is None else cache.layers[0].keys.device
        if device is None:
            return
        idle = _Idle(cache, None, None)
        if device.type == "cuda":
            idle = _Idle(cache, torch.cuda.current_stream(device), torch.cuda.Event())
            idle.used.record(idle.stream)
        with self._lock:
            self._idle.append(idle)
            bound = in_bytes(options.current().graphs_memory, _memory(device), source="HF_ROCM_GRAPHS_MEMORY=")
            while len(self._idle) > _MOST or sum(each.cache.nbytes for each in self._idle) > bound:
                self._drop()

    def clear(self) -> None:
        with self._lock:
            while self._idle:
                self._drop()

    def _drop(self) -> None:
        """Let the oldest go. Its memory may belong to another stream, which must not get it before it is done with."""
        oldest = self._idle.pop(0)
        if oldest.used is not None:
            oldest.used.synchronize()  # and only then does the name go

    def latest_recording(self) -> Any:
        """The newest recording over the cache that was used last, or None. See `runner._Held`."""
        with self._lock:
            held = [*self._idle[-1].cache.recordings.values()] if self._idle else []
        return next((each for each in reversed(held) if getattr(each, "proved", False)), None)

    def summary(self) -> tuple[int, int]:
        """How many caches are idle, and their bytes."""
        with self._lock:
            return len(self._idle), sum(each.cache.nbytes for each in self._idle)


def _serves(cache: DecodeCache, windows: Sequence[int | None], batch: int, needed: int) -> bool:
    return (
        cache.max_batch_size == batch
        and [layer.window for layer in cache.layers] == list(windows)
        and all(layer.room(needed) <= layer.capacity for layer in cache.layers)
        and cache.capacity <= _FACTOR * bucket(needed)
    )


def _memory(device: torch.device) -> int:
    """The device's memory in bytes."""
    if device.type == "cuda":
        total: int = torch.cuda.get_device_properties(device).total_memory
        return total
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
