"""Results as rows of text: for a terminal, and as Markdown for the documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_rocm.bench.clock import Spread
from hf_rocm.bench.machine import note
from hf_rocm.bench.measure import Result, Timing
from hf_rocm.bench.record import Segment
from hf_rocm.bench.sides import COMPILE, LABELS, OURS, OVERHEAD, STOCK

Row = tuple[str, ...]


def heading(segment: Segment) -> list[str]:
    """What stands above the figures: the model, the machine, its rates, and what such a machine can say."""
    model, rates = segment.model, segment.rates
    machine = dict(segment.machine)
    size = f", {model['matrix_bytes'] / 1e9:.2f} GB of matrices" if "matrix_bytes" in model else ""
    return [
        f"{model['name']}: {model['class']}, {model['weights']} weights, {model['dtype']}{size}",
        ", ".join([machine.pop("device"), *(f"{name} {value}" for name, value in machine.items())])
        + (f", commit {segment.commit}" if segment.commit else ""),
        f"copies {large(rates.copy)}B/s and multiplies {large(rates.matmul)}FLOP/s, measured in this run; medians of "
        + (f"{segment.rounds} interleaved rounds (quartiles)" if segment.results else f"{segment.rounds} replays"),
        *parallel(segment),
        note(machine),
    ]


def parallel(segment: Segment) -> list[str]:
    """How many ranks shared the model, and over what; nothing for one device."""
    told = segment.parallel
    if told is None:
        return []
    apart = told.get("apart")
    ways = "" if apart is None else "; the GPUs reach each other" if not apart else f"; {', '.join(apart)} do not"
    return [
        f"tensor parallel over {told['tp']} ranks, {told['backend']}{ways}; in large sums each rank sends "
        f"{large(told['wire'])}B/s. Matrices, floor and peak are those of one rank"
    ]


def exchange(segment: Segment, result: Result) -> list[str]:
    """What the ranks exchange in one unit of a case: computed, but for how long a sum takes."""
    for told in (segment.parallel or {}).get("exchanges", ()):
        if told["case"] == result.case.title:
            unit = "step" if result.case.kind == "decode" else "prompt"
            gathered = f" and {large(told['gathered'])}B of logits" if told["gathered"] else ""
            return [
                f"a {unit} exchanges {told['sums']} sums of {large(told['message'])}B{gathered}; each rank sends "
                f"{large(told['sent'])}B ({large(told['sent_per_token'])}B a token, computed). "
                f"One such sum, of ten in a row with nothing between them, took {told['sum_microseconds']:.1f} µs"
            ]
    return []


def title(result: Result) -> str:
    """A case and its floor."""
    floor = result.floor
    bound = f"{large(floor.bytes)}B" if floor.by == "memory" else f"{large(floor.flops)}FLOP"
    return f"{result.case.title}: floor {milliseconds(floor.milliseconds)} {result.case.unit} ({bound})"


def header(result: Result) -> Row:
    rate = "samples/s" if result.case.kind == "encode" else "tokens/s"
    share = "of copy rate" if result.floor.by == "memory" else "of matmul rate"
    row = ("side", result.case.unit, rate, "× stock", "× floor", share)
    return (*row, "first token, ms", "warm-up, s", "peak, GB") if result.case.kind == "decode" else (*row, "peak, GB")


def rows(result: Result) -> list[Row]:
    """One row a side, in the order of the run."""
    stock = _median(result, STOCK)
    return [_row(result, each, stock) for each in result.timings]


def reasons(result: Result, missing: dict[str, str]) -> list[str]:
    """Which sides have no row, and why."""
    return [f"{LABELS.get(side, side)}: {reason}" for side, reason in {**missing, **result.left_out}.items()]


def notes(result: Result) -> list[str]:
    """How sides ran, where their names don't say it."""
    return [
        f"{LABELS.get(each.side, each.side)}: {note}"
        for each in result.timings
        for note in (each.note, _alone(result, each))
        if note is not None
    ]


def _alone(result: Result, timing: Timing) -> str | None:
    if timing.replay is None:
        return None
    ratio = timing.replay / result.floor.milliseconds
    return f"a recorded step by itself takes {milliseconds(timing.replay)} ms, {ratio:.2f} × the floor"


def gains(result: Result) -> dict[str, float]:
    """How many times faster hf_rocm is: than stock, and than the better of stock's compiled forms."""
    ours = _median(result, OURS)
    compiled = [each for side in (COMPILE, OVERHEAD) if (each := _median(result, side)) is not None]
    found: dict[str, float] = {}
    if ours is None:
        return found
    stock = _median(result, STOCK)
    if stock is not None:
        found["stock"] = stock / ours
    if compiled:
        found["stock with torch.compile"] = min(compiled) / ours
    found["the floor"] = result.floor.milliseconds / ours
    return found


def kernels_by_case(segment: Segment) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The lines of `bench ops` by operation and case, in their order; the fastest implementation first."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in segment.kernels:
        found.setdefault((line["operation"], line["case"]), []).append(line)
    for lines in found.values():
        lines.sort(key=lambda line: (line["microseconds"] is None, line["microseconds"] or 0.0))
    return found


def kernel_row(line: dict[str, Any]) -> Row:
    """One implementation that was timed."""
    taken, floor = line["microseconds"], line["floor"]
    if not floor:
        return (line["implementation"], f"{taken:.2f}", "", "")
    return (line["implementation"], f"{taken:.1f}", f"{taken / floor:.2f}", f"{100 * line['share']:.0f} %")


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *lines))


def milliseconds(value: float) -> str:
    """Three digits that count."""
    return (
        f"{value:.0f}"
        if value >= 100
        else f"{value:.1f}"
        if value >= 20
        else f"{value:.2f}"
        if value >= 1
        else (f"{value:.3f}")
    )


def large(value: float) -> str:
    """With the prefix of a unit."""
    power, prefix = next(((each, name) for each, name in _PREFIXES if value >= each), (1e6, "M"))
    return f"{value / power:.{2 if value < 100 * power else 0}f} {prefix}"


_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def _row(result: Result, timing: Timing, stock: float | None) -> Row:
    case, median = result.case, timing.unit.median
    rate = case.rate(median)
    row = (
        LABELS.get(timing.side, timing.side),
        _spread(timing.unit),
        f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}",
        "" if stock is None else f"{stock / median:.2f}",
        f"{median / result.floor.milliseconds:.2f}",
        f"{100 * result.floor.milliseconds / median:.0f} %",
    )
    peak = "" if timing.peak is None else f"{timing.peak / 1e9:.2f}"
    if case.kind != "decode":
        return (*row, peak)
    first = "" if timing.first is None else milliseconds(timing.first.median)
    return (*row, first, f"{timing.warmup:.1f}", peak)


def _spread(spread: Spread) -> str:
    return f"{milliseconds(spread.median)} ({milliseconds(spread.low)}–{milliseconds(spread.high)})"


def _median(result: Result, side: str) -> float | None:
    return next((each.unit.median for each in result.timings if each.side == side), None)
