"""Times of calls, measured until the device has finished, as a median with quartiles or percentiles."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class Spread(NamedTuple):
    """The median and the first and third quartiles, in milliseconds."""

    median: float
    low: float
    high: float


def spread(seconds: Sequence[float]) -> Spread:
    """Return the spread, in milliseconds, of a non-empty sequence of times in seconds."""
    values = [1000 * second for second in seconds]
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(statistics.median(values), low, high)


class Percentiles(NamedTuple):
    """The median and the 95th and 99th percentiles in milliseconds, interpolated between the two nearest values."""

    median: float
    p95: float
    p99: float


def percentiles(seconds: Sequence[float]) -> Percentiles | None:
    """Return the percentiles, in milliseconds, of times in seconds; None for an empty sequence."""
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
    """Wait until the device has finished, and return the time in seconds."""
    synchronize(device)
    return time.perf_counter()


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds that one call takes, from an idle device to an idle device."""
    began = now(device)
    call()
    return now(device) - began


def device_time(
    calls: Sequence[Callable[[], Any]], device: torch.device, *, repeats: int = 5, record: bool = True
) -> list[float]:
    """Time a list of calls `repeats` times, without the host's overhead if possible.

    Returns the seconds per call, one value per repetition.

    On a GPU the calls are captured in a graph and replayed, so that the times do not include the host's launches. Calls
    that can't be captured are timed with their launches, and so are all calls if record is False. calls: repetitions of
    the same work. If cached data would distort the times, the calls must use different buffers, which together are
    larger than the GPU's caches.
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
    except RuntimeError:
        # For example, a call synchronises with the host or allocates in a way that can't be captured.
        torch.cuda.synchronize()
        return None
    return graph


def _loop(calls: Sequence[Callable[[], Any]], device: torch.device) -> float:
    began = now(device)
    for call in calls:
        call()
    return (now(device) - began) / len(calls)
