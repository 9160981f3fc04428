"""Timing: from start to the end of the device's work, reported as the median with quartiles or percentiles."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class Spread(NamedTuple):
    """Milliseconds: the median, and the first and third quartiles."""

    median: float
    low: float
    high: float


def spread(seconds: Sequence[float]) -> Spread:
    """The spread of at least one time in seconds, in milliseconds."""
    values = [1000 * second for second in seconds]
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(statistics.median(values), low, high)


class Percentiles(NamedTuple):
    """Milliseconds: the median, and the 95th and 99th percentiles, interpolated between the two nearest values."""

    median: float
    p95: float
    p99: float


def percentiles(seconds: Sequence[float]) -> Percentiles | None:
    """The percentiles of times in seconds, in milliseconds; None without a time."""
    if not seconds:
        return None
    values = [1000 * second for second in seconds]
    cuts = statistics.quantiles([*values, values[0]] if len(values) == 1 else values, n=100, method="inclusive")
    return Percentiles(cuts[49], cuts[94], cuts[98])


def synchronize(device: torch.device) -> None:
    """Wait for the device; a no-op on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(device: torch.device) -> float:
    """The time in seconds, after the device has finished."""
    synchronize(device)
    return time.perf_counter()


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, from an idle device to an idle device."""
    began = now(device)
    call()
    return now(device) - began


def device_time(
    calls: Sequence[Callable[[], Any]], device: torch.device, *, repeats: int = 5, record: bool = True
) -> list[float]:
    """Seconds per call of a list of calls, `repeats` times, without the host's overhead if possible.

    On a GPU the calls are recorded into a graph and replayed, so that launches cost nothing. Calls that can't be
    recorded are timed with their launches, as are all calls with record=False. calls: the same work on different
    buffers, which together are larger than the GPU's caches.
    """
    for call in calls[:3]:
        call()
    if device.type != "cuda":
        return [_loop(calls, device) for _ in range(repeats)]
    graph = _recorded(calls) if record else None
    replay = graph.replay if graph is not None else lambda: [call() for call in calls]
    replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / len(calls))
    return times


def _recorded(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph | None:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except RuntimeError:  # for example, it synchronises with the host or allocates in a way that cannot be recorded
        torch.cuda.synchronize()
        return None
    return graph


def _loop(calls: Sequence[Callable[[], Any]], device: torch.device) -> float:
    began = now(device)
    for call in calls:
        call()
    return (now(device) - began) / len(calls)
