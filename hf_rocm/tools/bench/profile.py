"""Profile a step: the kernels that take most of the time, and the gaps between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm.tools.bench import inputs
from hf_rocm.tools.bench.cases import Case
from hf_rocm.tools.bench.clock import synchronize
from hf_rocm.tools.bench.generating import call
from hf_rocm.tools.bench.measure import Progress
from hf_rocm.tools.bench.run import Subject, sides_of
from hf_rocm.tools.bench.variants import PREPARED, Side

# Profiled decode steps or forward passes.
STEPS = 16
SHOWN = 15
# The shortest gap to list, in µs.
LONG_GAP = 5.0


class Work(NamedTuple):
    """One run of a kernel on the device. start, end: in µs."""

    name: str
    start: float
    end: float


class Profile(NamedTuple):
    """The profile of one case.

    busy: µs per step in which a kernel runs. span: µs per step, from the start of the first kernel to the end of the
    last one. Both are 0 for a CPU.
    """

    title: str
    steps: int
    # Name → runs and µs, over all steps.
    kernels: dict[str, tuple[int, float]]
    busy: float
    span: float
    # The longest gaps between kernels in µs, with the kernels that follow them.
    gaps: tuple[tuple[float, str], ...]

    def rows(self) -> list[tuple[str, ...]]:
        """Return table rows for the kernels that take most of the time."""
        total = sum(time for _, time in self.kernels.values())
        longest = sorted(self.kernels.items(), key=lambda item: -item[1][1])[:SHOWN]
        return [
            (_short(name), f"{runs / self.steps:.1f}", f"{time / self.steps:.1f}", f"{100 * time / total:.1f} %")
            for name, (runs, time) in longest
        ]

    def lines(self) -> list[str]:
        """Return sentences about the time and the gaps of a step; none for a CPU."""
        if not self.span:
            return []
        idle = self.span - self.busy
        report = [
            f"a step takes {self.span:.0f} µs on the device, which is busy for {self.busy:.0f} and idle for "
            f"{idle:.0f} ({100 * idle / self.span:.0f} %)"
        ]
        if self.gaps:
            longest = "; ".join(f"{length:.0f} µs before {_short(name)}" for length, name in self.gaps)
            report.append(f"the longest gaps: {longest}")
        return report


def profile(subject: Subject, case: Case, trace: Path, *, progress: Progress, side: str = PREPARED) -> Profile:
    """Profile one case on one side after a warm-up, and write the trace in Chrome's format."""
    progress(f"{subject.name}: building the model")
    (chosen,), _ = sides_of(subject.load(), subject, [side])
    progress(f"{case.title}: profiling {side}")
    activities = [torch.profiler.ProfilerActivity.CPU]
    if subject.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.no_grad(), chosen.turn():
        for _ in range(2):
            _run_case(chosen, case, _NoRecorder())
        recorder = torch.profiler.profile(activities=activities)
        _run_case(chosen, case, recorder)
    trace.parent.mkdir(parents=True, exist_ok=True)
    recorder.export_chrome_trace(str(trace))
    title = f"{subject.name}, {side}: {case.title}"
    return summarise(title, _work(recorder), STEPS) if subject.device.type == "cuda" else _on_cpu(title, recorder)


def summarise(title: str, work: Sequence[Work], steps: int) -> Profile:
    """Sum the times of each kernel, and list the longest gaps. Time in which kernels overlap counts as busy once."""
    kernels: dict[str, tuple[int, float]] = {}
    busy, gaps, last = 0.0, [], None
    for event in sorted(work, key=lambda event: event.start):
        runs, time = kernels.get(event.name, (0, 0.0))
        kernels[event.name] = (runs + 1, time + event.end - event.start)
        if last is not None and event.start > last:
            gaps.append((event.start - last, event.name))
        busy += max(0.0, event.end - max(event.start, last if last is not None else event.start))
        last = event.end if last is None else max(last, event.end)
    first = min((event.start for event in work), default=0.0)
    span = 0.0 if last is None else last - first
    longest = sorted((gap for gap in gaps if gap[0] >= LONG_GAP), reverse=True)[:5]
    return Profile(title, steps, kernels, busy / steps, span / steps, tuple(longest))


class _NoRecorder:
    def start(self) -> None: ...

    def stop(self) -> None: ...


class _ProfilingStreamer:
    """A streamer that profiles `STEPS` steps after the third token. Tokens may arrive one step late.

    Up to transformers 5.16, the host waits for every streamed token, so there are gaps that other calls don't have.
    """

    def __init__(self, recorder: Any, device: torch.device) -> None:
        self.recorder, self.device, self.received = recorder, device, 0

    def put(self, value: Tensor) -> None:
        # The first value is the prompt.
        self.received += 1
        if self.received in (_START, _START + STEPS):
            synchronize(self.device)
            (self.recorder.start if self.received == _START else self.recorder.stop)()

    def end(self) -> None: ...


_START = 4


def _run_case(side: Side, case: Case, recorder: Any) -> None:
    device = side.model.device
    if case.kind == "decode":
        ids = inputs.tokens(side.model, case.batch, case.prompt)
        call(side, ids, _START + STEPS + 1, streamer=_ProfilingStreamer(recorder, device))
        return
    arguments = inputs.forward_inputs(side.model, case)
    recorder.start()
    for _ in range(STEPS):
        side(**arguments)
    synchronize(device)
    recorder.stop()


def _work(recorder: Any) -> list[Work]:
    """Return the kernels that ran on the GPU."""
    return [
        Work(event.name, event.time_range.start, event.time_range.end)
        for event in recorder.events()
        if event.device_type.name == "CUDA"
    ]


def _on_cpu(title: str, recorder: Any) -> Profile:
    """Return the operations on a CPU with their self time. There are no gaps."""
    by_name = {average.key: (average.count, float(average.self_cpu_time_total)) for average in recorder.key_averages()}
    return Profile(title, STEPS, by_name, 0.0, 0.0, ())


def _short(name: str) -> str:
    return name if len(name) <= 70 else name[:67] + "…"
