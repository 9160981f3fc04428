"""Recording a step on a device and replaying it: a CUDA graph, which is a HIP graph on ROCm."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Recording(Protocol):
    """A recorded step."""

    def replay(self) -> None:
        """Run the step's kernels again on the memory that they had when it was recorded, in stream order."""

    def release(self) -> None:
        """Let go of the kernels, whoever still holds the recording. It can't be replayed any more."""


class Recorder(Protocol):
    """Records steps for one cache; its recordings are replayed one at a time, in any order."""

    def record(self, run: Callable[[], T]) -> tuple[Recording, T]:
        """Record a step. Whether its kernels run meanwhile is the recorder's choice: none may change what they read.

        Returns the recording, and what the step returned, over memory that each replay fills anew. Whatever makes the
        step unfit to be recorded is raised.
        """


class GraphRecorder:
    """`torch.cuda.CUDAGraph`. All recordings of a device share one memory pool, which is kept for good.

    What a library keeps for a stream (cuBLAS its workspace) is then part of the pool as well, because nothing else ever
    runs on the stream of recordings: when someone else has PyTorch let go of it, as torch.compile does in
    `reduce-overhead`, its memory isn't given away. Recordings that share memory run one after another, on any stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record(self, run: Callable[[], T]) -> tuple[Recording, T]:
        shared = _shared(self._device)
        graph, result = _capture(shared, run)
        return _Graph(graph, shared), result


class _Graph:
    """One recording."""

    def __init__(self, graph: Any, shared: _Shared) -> None:
        self._graph = graph
        self._shared = shared

    def replay(self) -> None:
        shared = self._shared
        with shared.lock:
            current = torch.cuda.current_stream(shared.device)
            if current != shared.last:
                current.wait_stream(shared.last)
                shared.last = current
            self._graph.replay()

    def release(self) -> None:
        self._graph.reset()


class _Shared:
    """What the recordings of one device have in common."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.Lock()
        self.recording = torch.cuda.Stream(device)
        self.last: Any = torch.cuda.current_stream(device)  # where the last replay ran
        self.pool = torch.cuda.graph_pool_handle()
        number = torch.zeros(1, device=device)
        self.keeper = _capture(self, lambda: number.add_(1))[0]  # the pool is there as long as one graph is


def _capture(shared: _Shared, run: Callable[[], T]) -> tuple[Any, T]:
    graph: Any = torch.cuda.CUDAGraph()
    with _one_at_a_time, _no_collection(), _aside(shared.recording):
        _begin(graph, shared)
        try:
            result = run()
            graph.capture_end()
        except BaseException:
            _abandon(graph, shared)
            raise
    return graph, result


@contextmanager
def _aside(stream: Any) -> Iterator[None]:
    """Work on this stream, behind what was queued before and ahead of what follows; the host waits for nothing."""
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


_devices: dict[torch.device, _Shared] = {}
_abandoned: list[object] = []
_making = threading.Lock()


def _shared(device: torch.device) -> _Shared:
    device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
    with _making, torch.inference_mode(False):
        if device not in _devices:
            _devices[device] = _Shared(device)
        return _devices[device]


# Other threads go on working meanwhile: what they do is no part of a capture, nor can it break one.
_one_at_a_time = threading.Lock()


@contextmanager
def _no_collection() -> Iterator[None]:
    """No cycle is collected meanwhile: the end of some other graph or event would break the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _begin(graph: Any, shared: _Shared) -> None:
    """Begin a capture, and leave the device's random generator to the other threads.

    A capture takes possession of the generator's state, and drawing from it elsewhere would raise. So it is handed a
    copy; a step that draws random numbers itself then fails to be recorded, as it should.
    """
    generator: Any = torch.cuda.default_generators[shared.device.index]
    own = generator.graphsafe_get_state() if hasattr(generator, "graphsafe_set_state") else None
    if own is not None:
        generator.graphsafe_set_state(generator.clone_state())
    try:
        graph.capture_begin(pool=shared.pool, capture_error_mode="thread_local")
    finally:
        if own is not None:
            generator.graphsafe_set_state(own)


def _abandon(graph: Any, shared: _Shared) -> None:
    """End a capture that failed: the stream must not stay in capture mode.

    Of one that an error in the step's own code interrupted nothing stays, since it may hold collectives. One that was
    broken PyTorch leaves half ended: its allocators (the host's has no other way out) would ask the graph for as long
    as the process lives. So it is kept with its pool, and what follows gets another one.
    """
    try:
        graph.capture_end()
    except RuntimeError:  # it says once more that the capture was broken
        _leave_pool(shared)
        _abandoned.append((graph, shared))
        _devices.pop(shared.device, None)
    else:
        graph.reset()


def _leave_pool(shared: _Shared) -> None:
    """Tell the device's allocator that nothing is being captured into the pool any more.

    As long as it believes so, it gives no memory back to the driver, in `empty_cache` or when it is short of some, and
    none to anyone that a second stream has used.
    """
    leave = next((getattr(torch._C, name) for name in _LEAVE if hasattr(torch._C, name)), None)
    if leave is not None:
        with suppress(RuntimeError):  # a PyTorch that has done it already
            leave(shared.device.index, shared.pool)


_LEAVE = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")  # as it is called since 2.8, and before

Factory = Callable[[torch.device], Recorder]

# By type of device. ROCm's are of type `cuda`.
factories: dict[str, Factory] = {"cuda": GraphRecorder}

# The backends of torch.distributed whose collectives can be part of a recording, by type of device. RCCL is `nccl`.
collectives: dict[str, frozenset[str]] = {"cuda": frozenset(("nccl",))}
