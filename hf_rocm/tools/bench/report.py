"""Results as rows of text for a terminal, and as Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_rocm.tools.bench.clock import Spread
from hf_rocm.tools.bench.machine import note
from hf_rocm.tools.bench.measure import Result, Timing
from hf_rocm.tools.bench.record import Segment
from hf_rocm.tools.bench.variants import COMPILE, LABELS, OVERHEAD, PREPARED, STOCK

Row = tuple[str, ...]


def heading(segment: Segment) -> list[str]:
    """Return the heading: the model, the machine, its rates, and how to interpret its numbers."""
    model = segment.model
    machine = dict(segment.machine)
    size = f", {model['matrix_bytes'] / 1e9:.2f} GB of matrices" if "matrix_bytes" in model else ""
    return [
        f"{model['name']}: {model['class']}, {model['weights']} weights, {model['dtype']}{size}",
        ", ".join([machine.pop("device"), *(f"{name} {value}" for name, value in machine.items())])
        + (f", commit {segment.commit}" if segment.commit else ""),
        *_rates(segment),
        *parallel(segment),
        note(machine),
    ]


def _rates(segment: Segment) -> list[str]:
    if segment.rates is None:
        return []
    copy, matmul = large(segment.rates.copy), large(segment.rates.matmul)
    rounds = f"{segment.rounds} interleaved rounds (quartiles)" if segment.results else f"{segment.rounds} replays"
    return [f"measured in this run: {copy}B/s (copy) and {matmul}FLOP/s (matmul); medians of {rounds}"]


def parallel(segment: Segment) -> list[str]:
    """Describe the ranks and their interconnect. Returns an empty list for one device."""
    setup = segment.parallel
    if setup is None:
        return []
    unreachable = setup.get("apart")
    access = (
        f"; no peer access between GPUs {', '.join(unreachable)}"
        if unreachable
        else "; all GPUs have peer access to each other"
    )
    suffix = "" if unreachable is None else access
    return [
        f"tensor parallel across {setup['tp']} ranks, {setup['backend']}{suffix}; in large all-reduces each rank sends "
        f"{large(setup['wire'])}B/s. Matrices, roofline and peak are those of one rank"
    ]


def exchange(segment: Segment, result: Result) -> list[str]:
    """Describe the data that ranks exchange in one unit of a case: computed, except for the time of one all-reduce."""
    for record in (segment.parallel or {}).get("exchanges", ()):
        if record["case"] == result.case.title:
            unit = "step" if result.case.kind == "decode" else "prefill"
            gathered = f" and gathers {large(record['gathered'])}B of logits" if record["gathered"] else ""
            return [
                f"a {unit} performs {record['sums']} all-reduces of {large(record['message'])}B{gathered}; each rank "
                f"sends {large(record['sent'])}B ({large(record['sent_per_token'])}B per token, computed). One such "
                f"all-reduce, timed over ten in a row without other work, took {record['sum_microseconds']:.1f} µs"
            ]
    return []


def title(result: Result) -> str:
    """Return the title of a case, with its roofline."""
    floor = result.floor
    bound = f"{large(floor.bytes)}B" if floor.by == "memory" else f"{large(floor.flops)}FLOP"
    return f"{result.case.title}: roofline {milliseconds(floor.milliseconds)} {result.case.unit} ({bound})"


def table(result: Result) -> tuple[Row, list[Row]]:
    """Return the header and one row per side, in the order of the run. Columns without a value are left out."""
    rate = "samples/s" if result.case.kind == "encode" else "tokens/s"
    decode = ("TTFT, ms", "warm-up, s") if result.case.kind == "decode" else ()
    header = ("side", result.case.unit, rate, "× stock", "× roofline", *decode, "peak, GB")
    stock = _median(result, STOCK)
    rows = [_row(result, timing, stock) for timing in result.timings]
    filled = [any(cells) for cells in zip(*rows, strict=True)]
    return _cells(header, filled), [_cells(row, filled) for row in rows]


def _cells(row: Row, filled: Sequence[bool]) -> Row:
    return tuple(cell for cell, wanted in zip(row, filled, strict=True) if wanted)


def reasons(result: Result, missing: dict[str, str]) -> list[str]:
    """Return the sides without a row, and why they have none."""
    return [f"{LABELS.get(side, side)}: {reason}" for side, reason in {**missing, **result.left_out}.items()]


def notes(result: Result) -> list[str]:
    """Return notes on how the sides ran."""
    return [
        f"{LABELS.get(timing.side, timing.side)}: {note}"
        for timing in result.timings
        for note in (timing.note, _replay_note(result, timing))
        if note is not None
    ]


def _replay_note(result: Result, timing: Timing) -> str | None:
    if timing.replay is None:
        return None
    ratio = timing.replay / result.floor.milliseconds
    return f"a recorded step alone takes {milliseconds(timing.replay)} ms, {ratio:.2f} × the roofline"


def gains(result: Result) -> dict[str, float]:
    """Return hf_rocm's speed-up over stock and over stock with torch.compile, and its share of the roofline's rate.

    Empty if hf_rocm was not timed.
    """
    prepared = _median(result, PREPARED)
    compiled = [median for side in (COMPILE, OVERHEAD) if (median := _median(result, side)) is not None]
    ratios: dict[str, float] = {}
    if prepared is None:
        return ratios
    stock = _median(result, STOCK)
    if stock is not None:
        ratios["stock"] = stock / prepared
    if compiled:
        ratios["stock with torch.compile"] = min(compiled) / prepared
    ratios["the roofline"] = result.floor.milliseconds / prepared
    return ratios


def comparison(result: Result) -> list[str]:
    """Compare hf_rocm's speed with stock and with the faster form of stock with torch.compile, and note the noise.

    Two sides differ if their quartiles do not overlap. A side is noisy if its quartiles span more than a fifth
    of its median.
    """
    sides = {timing.side: timing.unit for timing in result.timings}
    prepared = sides.get(PREPARED)
    if prepared is None:
        return []
    compiled = [sides[side] for side in (COMPILE, OVERHEAD) if side in sides]
    others = {"stock": sides.get(STOCK), "stock with torch.compile": min(compiled, default=None)}
    different: list[str] = []
    alike: list[str] = []
    for name, other in others.items():
        if other is not None:
            overlaps = prepared.low <= other.high and other.low <= prepared.high
            ratio = other.median / prepared.median
            words = f"{ratio:.2f} × as fast as {name}" if ratio >= 1 else f"takes {1 / ratio:.2f} × the time of {name}"
            (alike if overlaps else different).append(words)
    noisy = [LABELS.get(side, side) for side, unit in sides.items() if unit.high - unit.low > unit.median / 5]
    lines = [f"hf_rocm: {', '.join(different)}{', but the times are noisy' if noisy else ''}"] if different else []
    if alike:
        lines.append(f"hf_rocm: within the noise (the quartiles overlap): {', '.join(alike)}")
    if len(result.timings[0].rounds) == 1:
        lines.append("one round shows no spread: use --rounds 5 or more")
    if noisy and lines:
        lines.append(f"noisy: the quartiles of {', '.join(noisy)} span more than 20 % of the median; use more --rounds")
    return lines


def kernels_by_case(segment: Segment) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Group the lines of `bench ops` by operation and case, in their order, with the fastest implementation first."""
    by_case: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in segment.kernels:
        by_case.setdefault((line["operation"], line["case"]), []).append(line)
    for lines in by_case.values():
        lines.sort(key=lambda line: (line["microseconds"] is None, line["microseconds"] or 0.0))
    return by_case


def kernel_row(line: dict[str, Any]) -> Row:
    """Return the row of one timed implementation."""
    time, floor = line["microseconds"], line["floor"]
    if not floor:
        return (line["implementation"], f"{time:.2f}", "", "")
    return (line["implementation"], f"{time:.1f}", f"{time / floor:.2f}", f"{100 * line['share']:.0f} %")


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *lines))


def milliseconds(value: float) -> str:
    """Format milliseconds with about three significant digits."""
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
    """Format a number with an SI prefix."""
    power, prefix = next(((prefix, name) for prefix, name in _PREFIXES if value >= prefix), (1e6, "M"))
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
    )
    peak = "" if timing.peak is None else f"{timing.peak / 1e9:.2f}"
    if case.kind != "decode":
        return (*row, peak)
    first = "" if timing.first is None else milliseconds(timing.first.median)
    return (*row, first, f"{timing.warmup:.1f}", peak)


def _spread(spread: Spread) -> str:
    return f"{milliseconds(spread.median)} ({milliseconds(spread.low)}–{milliseconds(spread.high)})"


def _median(result: Result, side: str) -> float | None:
    return next((timing.unit.median for timing in result.timings if timing.side == side), None)
