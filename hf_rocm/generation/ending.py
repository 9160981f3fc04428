"""Recordings that hold collectives go before their process group does: a communicator would wait for them for ever.

NCCL, and RCCL with it, counts the graphs that its collectives are part of, and ends only when none is left. So from the
first such recording on whatever ends a group lets the group's recordings go first, and so does the end of the process.
When nothing of the kind is left, PyTorch's own functions stand in their places again.
"""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol
from weakref import ReferenceType, ref

from hf_rocm.generation.cache import DecodeCache


class Releasable(Protocol):
    """A recording that can be ended, whoever holds it."""

    def release(self) -> None: ...


class _Watched(NamedTuple):
    recording: ReferenceType[Releasable]
    cache: ReferenceType[DecodeCache]
    group: Any


_watched: list[_Watched] = []
_lock = threading.RLock()
_changed: list[tuple[Any, str, Any, Callable[..., Any]]] = []  # where, the name, what was there, ours


def watch(recording: Releasable, cache: DecodeCache, group: Any) -> None:
    """Note that this recording over a cache holds collectives of a process group."""
    with _lock:
        _watched[:] = [each for each in _watched if each.recording() is not None]
        _watched.append(_Watched(ref(recording), ref(cache), group))
        if not _changed:
            atexit.register(let_go)
            ours: dict[int, Callable[..., Any]] = {}
            for where, name in _places():
                stock = getattr(where, name)
                wrapped = ours.setdefault(id(stock), _after_letting_go(stock))
                _changed.append((where, name, vars(where)[name], wrapped))  # in a class not what getattr gives
                setattr(where, name, wrapped)


def let_go(group: Any = None) -> None:
    """End every recording that holds collectives of this group, or of any, even one that an exception still holds."""
    with _lock:
        going = [each for each in _watched if group is None or each.group == group]
        _watched[:] = [each for each in _watched if each not in going]
        for each in going:
            cache, recording = each.cache(), each.recording()
            if cache is not None:
                cache.recordings.clear()
            if recording is not None:
                recording.release()
    tidy()


def tidy() -> None:
    """Give PyTorch its functions back if no such recording is left."""
    with _lock:
        if any(each.recording() is not None for each in _watched):
            return
        for where, name, stock, ours in _changed:
            if getattr(where, name) is ours:  # else someone wrapped it, and calls us through theirs
                setattr(where, name, stock)
        if _changed:
            _changed.clear()
            atexit.unregister(let_go)


def _places() -> Iterator[tuple[Any, str]]:
    """What users call, and what that calls for each group: they may have imported its name before."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    yield dist, "destroy_process_group"
    yield distributed_c10d, "destroy_process_group"
    for where, name in ((distributed_c10d, "_shutdown_backend"), (dist.ProcessGroup, "shutdown")):
        if name in vars(where):
            yield where, name


def _after_letting_go(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def end(*args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        group = args[0] if args else kwargs.get("group")
        let_go(None if group == dist.GroupMember.WORLD else group)
        return stock(*args, **kwargs)

    return end
