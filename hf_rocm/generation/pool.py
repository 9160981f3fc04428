"""Keep idle caches with their recordings, so that the next call of a similar size needs no new recording.

A cache belongs to one call at a time, in any thread: streaming usually starts a thread for every call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hf_rocm import options
from hf_rocm.budget import in_bytes
from hf_rocm.device import total_memory
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.cache_layer import bucket
from hf_rocm.generation.inputs import all_residents_of
from hf_rocm.generation.streams import record_current_stream, tensors_in

# The largest number of idle caches, however small they are.
_MAX_IDLE = 8

# The largest capacity of an idle cache that a call may use, as a multiple of the capacity that a new cache would have.
# Attention may read all rows.
_FACTOR = 2

# The number of tokens beyond the prompt that a new cache has room for. The cache grows if a call needs more.
_AHEAD = 1024


class _Idle(NamedTuple):
    """A cache, the stream of its last call, and an event recorded after that call. On a CPU, the last two are None."""

    cache: DecodeCache
    stream: Any
    used: Any

    @property
    def elsewhere(self) -> bool:
        """Whether this thread's current stream is a different one."""
        return self.stream is not None and bool(torch.cuda.current_stream(self.stream.device) != self.stream)


class Pool:
    """The idle caches of one model, the most recently used one last."""

    def __init__(self) -> None:
        self._idle: list[_Idle] = []
        self._lock = threading.Lock()

    def take(
        self,
        windows: Sequence[int | None],
        *,
        batch: int,
        prompt: int,
        limit: int,
        kind: type[DecodeCache] = DecodeCache,
        encoded: int = 0,
    ) -> DecodeCache:
        """Return an empty cache for a call: an idle cache of a suitable size, or a new one.

        windows: the sliding window of every layer. prompt: the number of tokens per row now. limit: the largest number
        of tokens per row that the call can reach. kind: the class of the cache. encoded: the length of the encoder's
        output.
        """
        needed = min(prompt + _AHEAD, limit) + 1
        with self._lock:
            fitting = [
                idle
                for idle in self._idle
                if idle.cache.encoder_length == encoded and _fits(idle.cache, windows, batch, needed)
            ]
            if not fitting:
                return kind(windows, capacity=bucket(needed), limit=limit)
            chosen = min(fitting, key=lambda idle: (idle.elsewhere, idle.cache.capacity))
            self._idle.remove(chosen)
        cache = chosen.cache
        if chosen.elsewhere:
            chosen.used.wait(torch.cuda.current_stream(chosen.stream.device))
            record_current_stream(tensors_in(cache, all_residents_of(cache)))
        cache.reset()
        cache.limit = limit
        return cache

    def put(self, cache: DecodeCache) -> None:
        """Keep a cache for the next call, if a call has written to it.

        Drops the least recently used caches while the number or the memory of the idle caches exceeds its limit.
        """
        device = cache.attending[0].keys.device if cache.is_initialized else None
        if device is None:
            return
        idle = _Idle(cache, None, None)
        if device.type == "cuda":
            idle = _Idle(cache, torch.cuda.current_stream(device), torch.cuda.Event())
            idle.used.record(idle.stream)
        with self._lock:
            self._idle.append(idle)
            bound = in_bytes(options.current().graphs_memory, total_memory(device), source="HF_ROCM_GRAPHS_MEMORY=")
            while len(self._idle) > _MAX_IDLE or sum(idle.cache.nbytes for idle in self._idle) > bound:
                self._drop()

    def clear(self) -> None:
        with self._lock:
            while self._idle:
                self._drop()

    def _drop(self) -> None:
        """Drop the least recently used cache after its last use has ended.

        The memory of the cache may have been allocated on a stream other than that of its last use.
        """
        oldest = self._idle.pop(0)
        if oldest.used is not None:
            # Wait before the last reference goes out of scope.
            oldest.used.synchronize()

    def latest_recording(self) -> Any:
        """The newest verified recording that uses the most recently used cache, or None. See `Recorded.proved`."""
        with self._lock:
            recordings = [*self._idle[-1].cache.recordings.values()] if self._idle else []
        return next((step for step in reversed(recordings) if getattr(step, "proved", False)), None)

    def summary(self) -> tuple[int, int]:
        """The number of idle caches, and their size in bytes."""
        with self._lock:
            return len(self._idle), sum(idle.cache.nbytes for idle in self._idle)


def _fits(cache: DecodeCache, windows: Sequence[int | None], batch: int, needed: int) -> bool:
    return (
        cache.max_batch_size == batch
        and cache.windows == tuple(windows)
        and all(layer.room(needed) <= layer.capacity for layer in cache.attending)
        and cache.capacity <= _FACTOR * bucket(needed)
    )
