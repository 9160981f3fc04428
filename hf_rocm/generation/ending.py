"""Recordings that hold collectives go before their process group does: a communicator would wait for them for ever.

NCCL, and RCCL with it, counts the graphs that its collectives are part of, and ends only when none is left. So from the
first such recording on `destroy_process_group` lets all of them go first, and so does the end of the process. When
nothing that was recorded is left, PyTorch's own function stands in its place again.
"""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from hf_rocm.generation.cache import DecodeCache

_NAME = "destroy_process_group"

_caches: WeakValueDictionary[int, DecodeCache] = WeakValueDictionary()
_lock = threading.RLock()
_changed: list[tuple[Any, Callable[..., Any], Callable[..., Any]]] = []  # a module, what it had, what we put there


def watch(cache: DecodeCache) -> None:
    """Note that recordings over this cache hold collectives."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    with _lock:
        _caches[id(cache)] = cache
        if not _changed:
            atexit.register(let_go)
            for module in (dist, distributed_c10d):
                stock = getattr(module, _NAME)
                ours = _after_letting_go(stock)
                setattr(module, _NAME, ours)
                _changed.append((module, stock, ours))


def let_go() -> None:
    """Drop every recording that holds collectives, wherever its cache is, and give PyTorch its function back."""
    with _lock:
        for cache in list(_caches.values()):
            cache.recordings.clear()
        _caches.clear()
        for module, stock, ours in _changed:
            if getattr(module, _NAME) is ours:  # else someone wrapped it, and calls us through theirs
                setattr(module, _NAME, stock)
        if _changed:
            _changed.clear()
            atexit.unregister(let_go)


def tidy() -> None:
    """Give PyTorch its function back if no such recording is left."""
    with _lock:
        if _changed and not any(cache.recordings for cache in list(_caches.values())):
            let_go()


def _after_letting_go(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        let_go()
        return stock(*args, **kwargs)

    return destroy_process_group
