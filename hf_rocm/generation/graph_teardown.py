"""Release recordings that contain collectives before their process group is destroyed, to prevent a deadlock.

NCCL and RCCL count the graphs that contain their collectives, and destroy a communicator only when none is left. So
while such recordings exist, every function that destroys a process group first releases the group's recordings, and
all such recordings are released at exit. When none is left, PyTorch's own functions are restored.
"""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol
from weakref import ReferenceType, ref

from hf_rocm import patches
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.patches import Change


class Releasable(Protocol):
    """A recording that can be released while other objects still reference it."""

    def release(self) -> None: ...


class _Watched(NamedTuple):
    recording: ReferenceType[Releasable]
    cache: ReferenceType[DecodeCache]
    group: Any


_watched: list[_Watched] = []
_lock = threading.RLock()


def watch(recording: Releasable, cache: DecodeCache, group: Any) -> None:
    """Register a recording that contains collectives of a process group. cache: the cache of the recorded step."""
    with _lock:
        _watched[:] = [entry for entry in _watched if entry.recording() is not None]
        _watched.append(_Watched(ref(recording), ref(cache), group))
        atexit.unregister(release)
        atexit.register(release)
        changes = (Change(owner, name, _after_release, key=__name__) for owner, name in _places())
        patches.apply(*changes, user=recording)


def release(group: Any = None) -> None:
    """Release every recording with collectives of this group (None: any group), even if a traceback references it."""
    with _lock:
        released = [entry for entry in _watched if group is None or entry.group == group]
        _watched[:] = [entry for entry in _watched if entry not in released]
        for entry in released:
            cache, recording = entry.cache(), entry.recording()
            if cache is not None:
                cache.recordings.clear()
            if recording is not None:
                recording.release()
                patches.release(recording)
    tidy()


def tidy() -> None:
    """Undo the changes for recordings that no longer exist. If no recording is left, unregister the exit handler."""
    patches.sweep()
    with _lock:
        if all(entry.recording() is None for entry in _watched):
            atexit.unregister(release)


def _places() -> Iterator[tuple[Any, str]]:
    """Yield `destroy_process_group` in two modules, and the functions that it calls for every group.

    The latter are needed because users may have imported `destroy_process_group` by name.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    yield dist, "destroy_process_group"
    yield distributed_c10d, "destroy_process_group"
    for owner, name in ((distributed_c10d, "_shutdown_backend"), (dist.ProcessGroup, "shutdown")):
        if name in vars(owner):
            yield owner, name


def _after_release(change: Change) -> Callable[..., Any]:
    @functools.wraps(getattr(change.owner, str(change.name)))
    def end(*args: Any, **kwargs: Any) -> Any:
        if not change.live:
            return change.original(*args, **kwargs)
        import torch.distributed as dist

        group = args[0] if args else kwargs.get("group")
        release(None if group == dist.GroupMember.WORLD else group)
        return change.original(*args, **kwargs)

    return end
