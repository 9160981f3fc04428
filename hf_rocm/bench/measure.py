"""Timing one case on every side: parity first, then round by round, each side in its turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hf_rocm.bench import inputs
from hf_rocm.bench.cases import Case
from hf_rocm.bench.clock import Spread, now, spread, synchronize, timed
from hf_rocm.bench.floor import Floor, cache_bytes, floor
from hf_rocm.bench.generating import Generated, generate
from hf_rocm.bench.parity import Parity, Reference, trial
from hf_rocm.bench.rates import Rates
from hf_rocm.bench.sides import DECODE_ONLY, OURS, UNCAPTURED, Side
from hf_rocm.errors import HfRocmError

WARM_ROUNDS = 2  # the first compiles and records, the second still fills the allocator's pools

Progress = Callable[[str], None]


class Timing(NamedTuple):
    """One side of a case. unit: milliseconds of one unit (a token, a forward). first: until the first token, ms.

    warmup: seconds that the first call took beyond a later one. peak: bytes of the device at most, weights included
    and other sides' caches not. rounds: each round's milliseconds, in order.
    note: how it ran, where that isn't plain. replay: milliseconds of the device for a recorded decode step by itself,
    without what transformers does around it.
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
    """One case: its floor, the sides that were timed, and why others weren't."""

    case: Case
    floor: Floor
    timings: tuple[Timing, ...]
    left_out: dict[str, str]


class Measurement(NamedTuple):
    """What all cases of a run share."""

    model: Any
    sides: Sequence[Side]
    reference: Reference | None
    rates: Rates
    rounds: int
    progress: Progress


class Mismatch(HfRocmError):
    """hf_rocm's own numbers are wrong: nothing is timed."""


def measure(run: Measurement, case: Case) -> Result:
    """Time one case. Raises `Mismatch` if hf_rocm's numbers are wrong; another side's only leave that side out."""
    left_out: dict[str, str] = {}
    samples: dict[str, _Samples] = {}
    for side in run.sides:
        if case.kind == "prefill" and side.name in DECODE_ONLY:
            left_out[side.name] = "it differs in decoding only"
            continue
        samples[side.name] = _Samples()
        run.progress(f"{case.title}: are the numbers of {side.name} right?")
        reason = _try(run, side, case, samples[side.name])
        if reason is not None:
            left_out[side.name] = reason
    timings = []
    running = [side for side in run.sides if side.name not in left_out]
    together = _all_fit(run.model, case, len(running))
    for group in [running] if together else [[side] for side in running]:
        _rounds(run, case, group, samples, left_out)
        timed = [side for side in group if side.name not in left_out]
        for side in timed:
            samples[side.name].replay = side.replay_alone() if case.kind == "decode" else None
        timings += [samples[side.name].timing(side, together=together) for side in timed]
        for side in group:
            _release(side, forget=True)
    return Result(case, floor(run.model, case, run.rates), tuple(timings), left_out)


def _rounds(
    run: Measurement, case: Case, sides: Sequence[Side], samples: dict[str, _Samples], left_out: dict[str, str]
) -> None:
    """Time sides in turn, round by round; one that fails is left out from there on."""
    for number in range(WARM_ROUNDS + run.rounds):
        for side in [side for side in sides if side.name not in left_out]:
            run.progress(f"{case.title}: {_round(number, run.rounds)}, {side.name}")
            reason = _turn(side, case, samples[side.name], warm=number < WARM_ROUNDS)
            if reason is not None:
                left_out[side.name] = reason
                _release(side, forget=True)


class _Samples:
    """What the turns of one side gave."""

    def __init__(self) -> None:
        self.unit: list[float] = []
        self.first: list[float] = []
        self.whole: list[float] = []
        self.cold: float | None = None
        self.peak: int | None = None
        self.parity: Parity | None = None
        self.replay: float | None = None

    def timing(self, side: Side, *, together: bool) -> Timing:
        assert self.cold is not None
        apart = None if together else "its rounds in a row: the caches of all sides don't fit into memory"
        notes = "; ".join(note for note in (side.note(), apart) if note is not None)
        warmup = max(0.0, self.cold - spread(self.whole).median / 1000)
        first = spread(self.first) if self.first else None
        rounds = tuple(round(1000 * each, 5) for each in self.unit)
        return Timing(
            side.name, spread(self.unit), first, warmup, self.peak, rounds, self.parity, notes or None, self.replay
        )


def _try(run: Measurement, side: Side, case: Case, samples: _Samples) -> str | None:
    """Is the side right? Its first run tells, which is its warm-up too. Returns why it is left out, if it is."""
    if run.reference is None:
        return None
    tried, reason = _first_run(side, samples, lambda: trial(side, case))
    if tried is None:
        _release(side, forget=True)
        return reason
    if not tried.same:  # its warm-up was another one's
        samples.cold = samples.peak = None
        _release(side, forget=True)
    parity, reason = _guarded(side, lambda: run.reference.judge(tried))  # type: ignore[union-attr]
    if parity is None:
        return reason
    samples.parity = parity
    if parity.refusal is None:
        return None
    _release(side, forget=True)
    if side.name not in (OURS, UNCAPTURED):
        return str(parity.refusal)
    raise Mismatch(
        f"{side.name} gives wrong numbers, so nothing is timed",
        facts={
            "case": case.title,
            "error": f"{parity.error:.4g}",
            "allowed": f"{parity.allowed:.4g} (twice eager's {parity.eager:.4g} and a rounding step)",
        },
        hint="`hf-rocm explain MODEL` says which kernels serve it; please report this with its output",
    )


def _turn(side: Side, case: Case, samples: _Samples, *, warm: bool) -> str | None:
    """One timed run, or why there is none."""
    device = side.model.device

    def run() -> Generated:
        with torch.no_grad(), side.turn():
            if case.kind == "decode":
                return generate(side, inputs.tokens(side.model, case.batch, case.prompt), case)
            arguments = inputs.forward_inputs(side.model, case)
            taken = timed(lambda: side(**arguments), device)
            return Generated(None, taken, taken)

    if samples.cold is None:
        found, reason = _first_run(side, samples, run)
    else:
        found, reason = _guarded(side, run)
    if found is None:
        return reason
    if not warm:
        samples.unit.append(found.each)
        samples.whole.append(found.whole)
        if found.first is not None:
            samples.first.append(found.first)
    return None


def _first_run(side: Side, samples: _Samples, call: Callable[[], Any]) -> tuple[Any, str | None]:
    """The side's first run of a case: how long it took in all, and how much memory at most."""
    device = side.model.device
    before = _start_of_peak(device)
    began = now(device)
    found, reason = _guarded(side, call)
    samples.cold = now(device) - began
    samples.peak = _peak(device, before, side.model)
    return found, reason


def _guarded(side: Side, call: Callable[[], Any]) -> tuple[Any, str | None]:
    """What the call returns, or why this side can't run. Only lacking memory excuses hf_rocm."""
    try:
        return call(), None
    except torch.OutOfMemoryError:
        return None, "it needs more memory than there is"
    except Exception as error:  # what stock or a compiler raises is a result about them, and no reason to stop
        if side.name in (OURS, UNCAPTURED):
            raise
        lines = str(error).strip().splitlines() or ["no message"]
        return None, f"it raised {type(error).__name__}: {lines[0][:200]}"


def _release(side: Side, *, forget: bool = False) -> None:
    (side.forget if forget else side.release)()
    if side.model.device.type == "cuda":
        synchronize(side.model.device)
        torch.cuda.empty_cache()


def _all_fit(model: Any, case: Case, count: int) -> bool:
    """Whether each side may keep its caches, with what it recorded over them, until its next turn."""
    if case.kind != "decode" or model.device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(model.device)
    return (count + 1) * cache_bytes(model, case) < free / 2


def _start_of_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device, before: int, model: Any) -> int | None:
    """Of this side alone: what it added to what was there, and the weights, which all sides share."""
    if device.type != "cuda":
        return None
    weights = sum({each.data_ptr(): each.nbytes for each in model.parameters()}.values())
    return torch.cuda.max_memory_allocated(device) - before + weights


def _round(number: int, rounds: int) -> str:
    return f"warm-up {number + 1}" if number < WARM_ROUNDS else f"round {number - WARM_ROUNDS + 1} of {rounds}"
