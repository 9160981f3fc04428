"""Time one case on every side: check parity first, then run interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hf_rocm.device import free_memory
from hf_rocm.errors import HfRocmError
from hf_rocm.tools.bench import inputs
from hf_rocm.tools.bench.cases import Case
from hf_rocm.tools.bench.clock import Spread, now, spread, synchronize, timed
from hf_rocm.tools.bench.generating import Generated, generate
from hf_rocm.tools.bench.parity import Parity, Reference, trial
from hf_rocm.tools.bench.rates import Rates
from hf_rocm.tools.bench.roofline import Floor, cache_bytes, floor
from hf_rocm.tools.bench.variants import DECODE_ONLY, NOT_DECODING, PREPARED, UNCAPTURED, Side

# The first round compiles and records graphs, and the second fills the allocator's pools. Up to the fourth, recorded
# steps are compared with uncaptured ones in every call of 128 tokens; later, in about one call out of five.
WARM_ROUNDS = 4

# Forward passes of an encoder per warm-up round. There are several, because early replays are compared with uncaptured
# passes more often than later ones.
WARM_FORWARDS = 12

Progress = Callable[[str], None]


class Timing(NamedTuple):
    """The times of one side in one case.

    unit: milliseconds per unit (a token or a forward pass). first: milliseconds until the first token. warmup: seconds
    by which the first run of the case took longer than the median of the timed calls. peak: peak bytes on the device,
    including the weights but not other sides' caches. rounds: milliseconds per unit in each round, in order. note: how
    the side ran, if that is not obvious. replay: milliseconds on the device for a recorded step alone, without
    transformers' work.
    """

    side: str
    unit: Spread
    first: Spread | None
    warmup: float
    peak: int | None
    rounds: tuple[float, ...]
    parity: Parity | None
    note: str | None = None
    replay: float | None = None


class Result(NamedTuple):
    """One case: its roofline, the timed sides, and the reasons why other sides were left out."""

    case: Case
    floor: Floor
    timings: tuple[Timing, ...]
    left_out: dict[str, str]


class Measurement(NamedTuple):
    """The state that all cases of a run share."""

    model: Any
    sides: Sequence[Side]
    reference: Reference | None
    rates: Rates
    rounds: int
    progress: Progress


class Mismatch(HfRocmError):
    """hf_rocm's results (with several ranks, the results of any side) are wrong, so nothing is timed."""


def measure(run: Measurement, case: Case) -> Result:
    """Time one case. Raises `Mismatch` if hf_rocm's results are wrong; other sides with wrong results are left out."""
    left_out: dict[str, str] = {}
    samples: dict[str, _Samples] = {}
    for side in run.sides:
        if case.kind == "prefill" and side.name in DECODE_ONLY:
            left_out[side.name] = NOT_DECODING
            continue
        samples[side.name] = _Samples()
        run.progress(f"{case.title}: checking the results of {side.name}")
        reason = _try(run, side, case, samples[side.name])
        if reason is not None:
            left_out[side.name] = reason
    timings = []
    running = [side for side in run.sides if side.name not in left_out]
    interleaved = _all_fit(run.model, case, len(running))
    for group in [running] if interleaved else [[side] for side in running]:
        _rounds(run, case, group, samples, left_out)
        timed = [side for side in group if side.name not in left_out]
        for side in timed:
            samples[side.name].replay = side.replay_alone() if case.kind != "prefill" else None
        timings += [samples[side.name].timing(side, interleaved=interleaved) for side in timed]
        for side in group:
            _release(side, forget=True)
    return Result(case, floor(run.model, case, run.rates), tuple(timings), left_out)


def _rounds(
    run: Measurement, case: Case, sides: Sequence[Side], samples: dict[str, _Samples], left_out: dict[str, str]
) -> None:
    """Time sides in interleaved rounds. A side that fails is left out of the remaining rounds."""
    for number in range(WARM_ROUNDS + run.rounds):
        for side in [side for side in sides if side.name not in left_out]:
            run.progress(f"{case.title}: {_round(number, run.rounds)}, {side.name}")
            reason = _turn(side, case, samples[side.name], warm=number < WARM_ROUNDS)
            if reason is not None:
                left_out[side.name] = reason
                _release(side, forget=True)


class _Samples:
    """The measurements of one side."""

    def __init__(self) -> None:
        self.unit: list[float] = []
        self.first: list[float] = []
        self.whole: list[float] = []
        self.cold: float | None = None
        self.peak: int | None = None
        self.parity: Parity | None = None
        self.replay: float | None = None

    def timing(self, side: Side, *, interleaved: bool) -> Timing:
        assert self.cold is not None
        not_interleaved = (
            None
            if interleaved
            else "its rounds were not interleaved, because the caches of all sides do not fit in memory together"
        )
        notes = "; ".join(note for note in (side.note(), not_interleaved) if note is not None)
        warmup = max(0.0, self.cold - spread(self.whole).median / 1000)
        first = spread(self.first) if self.first else None
        rounds = tuple(round(1000 * unit, 5) for unit in self.unit)
        return Timing(
            side.name, spread(self.unit), first, warmup, self.peak, rounds, self.parity, notes or None, self.replay
        )


def _try(run: Measurement, side: Side, case: Case, samples: _Samples) -> str | None:
    """Check a side on its first run, whose time is measured too. Returns the reason to leave it out, or None."""
    if run.reference is None:
        return None
    attempt, reason = _first_run(side, samples, lambda: trial(side, case))
    if attempt is None:
        _release(side, forget=True)
        return reason
    # The run had other inputs, so it did not warm up the case itself.
    if not attempt.same:
        samples.cold = samples.peak = None
        _release(side, forget=True)
    parity, reason = _guarded(side, lambda: run.reference.judge(attempt))  # type: ignore[union-attr]
    if parity is None:
        return reason
    samples.parity = parity
    if parity.refusal is None:
        return None
    _release(side, forget=True)
    if side.name not in (PREPARED, UNCAPTURED):
        return str(parity.refusal)
    raise Mismatch(
        f"{side.name} returns wrong results, so nothing is timed",
        facts={
            "case": case.title,
            "error": f"{parity.error:.4g}",
            "allowed": f"{parity.allowed:.4g} (twice eager's {parity.eager:.4g}, plus a rounding step)",
        },
        hint="please report this with the output of `hf-rocm explain MODEL`, which lists the kernels",
    )


def _turn(side: Side, case: Case, samples: _Samples, *, warm: bool) -> str | None:
    """Time one run. Returns the reason if it failed, else None."""
    device = side.model.device

    def run() -> Generated:
        with torch.no_grad(), side.turn():
            if case.kind == "decode":
                return generate(side, inputs.tokens(side.model, case.batch, case.prompt), case)
            arguments = inputs.forward_inputs(side.model, case)
            for _ in range(WARM_FORWARDS - 1 if warm and case.kind == "encode" else 0):
                side(**arguments)
            seconds = timed(lambda: side(**arguments), device)
            return Generated(None, seconds, seconds)

    if samples.cold is None:
        outcome, reason = _first_run(side, samples, run)
    else:
        outcome, reason = _guarded(side, run)
    if outcome is None:
        return reason
    if not warm:
        samples.unit.append(outcome.later)
        samples.whole.append(outcome.whole)
        if outcome.first is not None:
            samples.first.append(outcome.first)
    return None


def _first_run(side: Side, samples: _Samples, call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Measure the time and peak memory of the side's first run of a case."""
    device = side.model.device
    before = _start_of_peak(device)
    began = now(device)
    outcome, reason = _guarded(side, call)
    samples.cold = now(device) - began
    samples.peak = _peak(device, before, side.model)
    return outcome, reason


def _guarded(side: Side, call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return the call's result and None, or None and a reason. An error in hf_rocm is raised unless memory ran out."""
    try:
        return call(), None
    except torch.OutOfMemoryError:
        return None, "it needs more memory than is available"
    except Exception as error:
        # An exception from stock or a compiler is a result, and does not end the benchmark.
        if side.name in (PREPARED, UNCAPTURED):
            raise
        lines = str(error).strip().splitlines() or ["no message"]
        return None, f"it raised {type(error).__name__}: {lines[0][:200]}"


def _release(side: Side, *, forget: bool = False) -> None:
    (side.forget if forget else side.release)()
    if side.model.device.type == "cuda":
        synchronize(side.model.device)
        torch.cuda.empty_cache()


def _all_fit(model: Any, case: Case, count: int) -> bool:
    """Return whether memory suffices for all sides to keep their caches and recordings until the next round."""
    if case.kind != "decode" or model.device.type != "cuda":
        return True
    return (count + 1) * cache_bytes(model, case) < free_memory(model.device) / 2


def _start_of_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device, before: int, model: Any) -> int | None:
    """Return the peak memory of this side: its own allocations plus the shared weights; None on the CPU."""
    if device.type != "cuda":
        return None
    weights = sum({parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}.values())
    return torch.cuda.max_memory_allocated(device) - before + weights


def _round(number: int, rounds: int) -> str:
    return f"warm-up {number + 1}" if number < WARM_ROUNDS else f"round {number - WARM_ROUNDS + 1} of {rounds}"
