"""Where a step's time goes: the kernels that take most of it, and how long the GPU waits between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm.bench import inputs
from hf_rocm.bench.cases import Case
from hf_rocm.bench.clock import synchronize
from hf_rocm.bench.generating import run_with
from hf_rocm.bench.measure import Progress
from hf_rocm.bench.run import Subject, sides_of
from hf_rocm.bench.sides import OURS, Side

STEPS = 16  # decode steps, or forwards, that are recorded
SHOWN = 15
LONG_GAP = 5.0  # µs


class Work(NamedTuple):
    """One kernel run on the device. start, end: µs."""

    name: str
    start: float
    end: float


class Profile(NamedTuple):
    """One case, in µs a step. busy: at least one kernel ran. gaps: from the end of one to the start of the next."""

    title: str
    steps: int
    kernels: dict[str, tuple[int, float]]  # name → runs and µs, all steps together
    busy: float
    span: float
    gaps: tuple[tuple[float, str], ...]  # the longest ones, each with the kernel that it waits for

    def rows(self) -> list[tuple[str, ...]]:
        """The kernels that take most of the time."""
        total = sum(time for _, time in self.kernels.values())
        longest = sorted(self.kernels.items(), key=lambda item: -item[1][1])[:SHOWN]
        return [
            (_short(name), f"{runs / self.steps:.1f}", f"{time / self.steps:.1f}", f"{100 * time / total:.1f} %")
            for name, (runs, time) in longest
        ]

    def lines(self) -> list[str]:
        """Sentences about the gaps; none for a CPU."""
        if not self.span:
            return []
        idle = self.span - self.busy
        found = [
            f"a step takes {self.span:.0f} µs on the device, of which it is busy for {self.busy:.0f} and waits for "
            f"{idle:.0f} ({100 * idle / self.span:.0f} %)"
        ]
        if self.gaps:
            longest = "; ".join(f"{length:.0f} µs before {_short(name)}" for length, name in self.gaps)
            found.append(f"the longest gaps: {longest}")
        return found


def profile(subject: Subject, case: Case, trace: Path, *, progress: Progress, side: str = OURS) -> Profile:
    """Profile one case on one side, warmed up, and write the trace in Chrome's format."""
    progress(f"{subject.name}: making the model")
    (chosen,), _ = sides_of(subject.load(), subject, [side])
    progress(f"{case.title}: profiling {side}")
    activities = [torch.profiler.ProfilerActivity.CPU]
    if subject.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.no_grad(), chosen.turn():
        for _ in range(2):
            _once(chosen, case, _Nothing())
        recorder = torch.profiler.profile(activities=activities)
        _once(chosen, case, recorder)
    trace.parent.mkdir(parents=True, exist_ok=True)
    recorder.export_chrome_trace(str(trace))
    title = f"{subject.name}, {side}: {case.title}"
    return summarise(title, _work(recorder), STEPS) if subject.device.type == "cuda" else _on_cpu(title, recorder)


def summarise(title: str, work: Sequence[Work], steps: int) -> Profile:
    """Add up kernels and gaps. Kernels may overlap: time in which several run counts as busy once."""
    kernels: dict[str, tuple[int, float]] = {}
    busy, gaps, last = 0.0, [], None
    for each in sorted(work, key=lambda each: each.start):
        runs, time = kernels.get(each.name, (0, 0.0))
        kernels[each.name] = (runs + 1, time + each.end - each.start)
        if last is not None and each.start > last:
            gaps.append((each.start - last, each.name))
        busy += max(0.0, each.end - max(each.start, last if last is not None else each.start))
        last = each.end if last is None else max(last, each.end)
    first = min((each.start for each in work), default=0.0)
    span = 0.0 if last is None else last - first
    longest = sorted((gap for gap in gaps if gap[0] >= LONG_GAP), reverse=True)[:5]
    return Profile(title, steps, kernels, busy / steps, span / steps, tuple(longest))


class _Nothing:
    def start(self) -> None: ...

    def stop(self) -> None: ...


class _StartAtFirst:
    """A logits processor that starts the recorder once the prompt is done, so that only decode steps are recorded."""

    def __init__(self, recorder: Any, device: torch.device) -> None:
        self.recorder, self.device, self.started = recorder, device, False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.started:
            synchronize(self.device)
            self.recorder.start()
            self.started = True
        return scores


def _once(side: Side, case: Case, recorder: Any) -> None:
    device = side.model.device
    if case.kind == "decode":
        ids = inputs.tokens(side.model, case.batch, case.prompt)
        run_with(side, ids, STEPS + 1, _StartAtFirst(recorder, device))
    else:
        arguments = inputs.forward_inputs(side.model, case)
        recorder.start()
        for _ in range(STEPS):
            side(**arguments)
    synchronize(device)
    recorder.stop()


def _work(recorder: Any) -> list[Work]:
    """What ran on the GPU."""
    return [
        Work(each.name, each.time_range.start, each.time_range.end)
        for each in recorder.events()
        if each.device_type.name == "CUDA"
    ]


def _on_cpu(title: str, recorder: Any) -> Profile:
    """A CPU's operations by the time that is their own; it has no queue that could run dry."""
    found = {each.key: (each.count, float(each.self_cpu_time_total)) for each in recorder.key_averages()}
    return Profile(title, STEPS, found, 0.0, 0.0, ())


def _short(name: str) -> str:
    return name if len(name) <= 70 else name[:67] + "…"
