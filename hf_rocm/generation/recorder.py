"""Record a step on a device and replay it, as a CUDA graph, which is a HIP graph on ROCm."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import torch

from hf_rocm.generation.streams import separate_stream

T = TypeVar("T")


class Recording(Protocol):
    """A recorded step, ready for replay."""

    def replay(self) -> None:
        """Run the step's kernels again, in stream order, on the memory that they used when the step was recorded."""

    def release(self) -> None:
        """Free the recorded kernels, even if the recording is still referenced. It can no longer be replayed."""


class Recorder(Protocol):
    """Records the steps of one cache, or one model's forwards. Recordings are replayed one at a time, in any order."""

    def record(self, run: Callable[[], T]) -> tuple[Recording, T]:
        """Record a step. Its kernels may or may not run, and must not change their own inputs.

        Returns the recording and the step's result, whose memory every replay overwrites. Raises any error that
        prevents the recording.
        """


class GraphRecorder:
    """Records with `torch.cuda.CUDAGraph`. All recordings of a device share one memory pool, which is never freed.

    After a capture that was invalidated, later recordings use a new pool.

    The pool also contains memory that a library allocates for the recording stream during a capture, such as the
    workspace of cuBLAS. This is safe, because nothing else runs on that stream. When other code makes PyTorch free the
    workspace, as torch.compile does with `mode="reduce-overhead"`, the allocator does not reuse that memory elsewhere.
    Recordings that share memory run one after another, on any stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record(self, run: Callable[[], T]) -> tuple[Recording, T]:
        shared = _shared(self._device)
        graph, result = _capture(shared, run)
        return _Graph(graph, shared), result


class _Graph:
    """A captured graph, with the lock and the memory pool of its device."""

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
    """The lock, stream and memory pool that all recordings of one device share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.Lock()
        self.recording = separate_stream(device)
        # The stream of the last replay.
        self.last: Any = torch.cuda.current_stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        number = torch.zeros(1, device=device)
        # The pool exists while a graph uses it.
        self.keeper = _capture(self, lambda: number.add_(1))[0]


def _capture(shared: _Shared, run: Callable[[], T]) -> tuple[Any, T]:
    graph: Any = torch.cuda.CUDAGraph()
    with _one_at_a_time, _no_collection(), _on_stream(shared.recording):
        _begin(graph, shared)
        try:
            result = run()
            graph.capture_end()
        except BaseException:
            _abandon(graph, shared)
            raise
    return graph, result


@contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    """Use this stream within the block: after all earlier and before all later work of the current stream.

    The host does not wait.
    """
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


# One capture at a time. Work of other threads is not part of a capture and can't break it, unless it runs in the stream
# of a process group with collectives in the capture: that stream is from the pool of `torch.cuda.Stream`.
_one_at_a_time = threading.Lock()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection within the block: destroying another graph or event would break the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _begin(graph: Any, shared: _Shared) -> None:
    """Begin a capture without blocking the device's random generator for other threads.

    A capture registers the state of the generator, and drawing from it in another thread would raise an error. So the
    capture gets a copy of the state. Recording a step that draws random numbers fails, as intended.
    """
    generator: Any = torch.cuda.default_generators[shared.device.index]
    state = generator.graphsafe_get_state() if hasattr(generator, "graphsafe_set_state") else None
    if state is not None:
        generator.graphsafe_set_state(generator.clone_state())
    try:
        graph.capture_begin(pool=shared.pool, capture_error_mode="thread_local")
    finally:
        if state is not None:
            generator.graphsafe_set_state(state)


def _abandon(graph: Any, shared: _Shared) -> None:
    """End a failed capture, so that the stream does not stay in capture mode.

    If an error in the step's own code interrupted the capture, the graph is freed, since it may contain collectives. If
    the capture was invalidated, PyTorch ends it only in part: its allocators keep using the graph until the process
    ends, and there is no way to stop the host allocator. So the graph is kept with its pool, and later recordings use
    another pool.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        # The same error is raised again if the capture was invalidated.
        _leave_pool(shared)
        _abandoned.append((graph, shared))
        _devices.pop(shared.device, None)
    else:
        graph.reset()


def _leave_pool(shared: _Shared) -> None:
    """End the allocation to this pool in the device's allocator.

    Until then the allocator does not return memory to the driver, not even in `empty_cache` or when it runs out of
    memory, and does not reuse memory that a second stream has used.
    """
    end_allocation = next((getattr(torch._C, name) for name in _LEAVE if hasattr(torch._C, name)), None)
    if end_allocation is not None:
        # PyTorch raises RuntimeError if it has already ended the allocation.
        with suppress(RuntimeError):
            end_allocation(shared.device.index, shared.pool)


# The name of the function that `_leave_pool` calls: from PyTorch 2.8 on, and in earlier releases.
_LEAVE = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")

Factory = Callable[[torch.device], Recorder]

# Recorders by device type. ROCm devices have the type `cuda`.
factories: dict[str, Factory] = {"cuda": GraphRecorder}

# The backends of torch.distributed whose collectives can be recorded, by device type. RCCL is `nccl`.
collectives: dict[str, frozenset[str]] = {"cuda": frozenset(("nccl",))}
