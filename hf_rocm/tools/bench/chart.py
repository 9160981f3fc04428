"""The chart of a comparison: panels with a bar and its spread per side, and a line for the roofline.

A case has one panel. A load on servers has one for the time per token and one for each time in `figures.TIMES` that was
measured. The picture is narrow, and labels and numbers are above the bars, so that it stays readable on a phone.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_rocm import files
from hf_rocm.tools import drawing
from hf_rocm.tools.bench.measure import Result
from hf_rocm.tools.bench.record import Segment
from hf_rocm.tools.bench.report import large, milliseconds
from hf_rocm.tools.bench.serving.figures import TIMES, by_case
from hf_rocm.tools.bench.variants import COMPILE, LABELS, LIGER, OVERHEAD, PREPARED, STOCK, UNCAPTURED
from hf_rocm.tools.drawing import Box, ChartError, Line, Part, Picture, Words

COLOURS = {
    STOCK: "#b8c2cc",
    COMPILE: "#8795a1",
    OVERHEAD: "#606f7b",
    LIGER: "#d9b36c",
    UNCAPTURED: "#eab0a8",
    PREPARED: "#d1382b",
}
INK, FAINT = "#1f2933", "#66727f"

WIDTH, MARGIN = 480.0, 20.0
# Heights: the line above a bar, the bar, the space below it.
TEXT, BAR, GAP = 16.0, 12.0, 8.0
# Font sizes: the title, labels and numbers, footer and units.
TITLE, LABEL, NOTE = 15.0, 13.0, 11.5
# Average width of a character in the widest font, as a fraction of the font size.
CHARACTER = 0.6
FLOOR = "#2f855a"


class Bar(NamedTuple):
    """One side of a panel. value: the median. low, high: the first and third quartiles, or the median and the 95th
    percentile. All three are equal if there is only one value."""

    side: str
    label: str
    value: float
    low: float
    high: float


class Panel(NamedTuple):
    """One case, or one time of a load.

    The bars and the roofline, if there is one, are in milliseconds. unit: the printed unit, except for decoding (see
    `_END_TO_END`).
    """

    title: str
    unit: str
    kind: str
    floor: float | None
    bars: tuple[Bar, ...]


def check(file: Path) -> None:
    """Raise `ChartError` early if the suffix is not supported, or if it is .png and Pillow is not installed."""
    if file.suffix not in ("", ".svg", ".png"):
        raise ChartError(
            f"a chart can't be written to {file.name}", hint="use the suffix .svg or .png, or no suffix for both"
        )
    if file.suffix == ".png" and not drawing.can_png():
        drawing.png(Picture(0, 0, (), ""))


def save(segments: Sequence[Segment], file: Path, *, title: str | None = None) -> list[Path]:
    """Draw the cases of all segments, which must have the same model and machine. Returns the files written.

    file: a path with the suffix .svg or .png. Without a suffix, both are written, but the PNG only if Pillow is
    installed. Raises `ChartError`.
    """
    check(file)
    picture = draw(title or f"{segments[0].model['name']} on {segments[0].machine['device']}", segments)
    wanted: list[tuple[Path, str | bytes]] = []
    if file.suffix in ("", ".svg"):
        wanted.append((file.with_suffix(".svg"), drawing.svg(picture)))
    if file.suffix == ".png" or (file.suffix == "" and drawing.can_png()):
        wanted.append((file.with_suffix(".png"), drawing.png(picture)))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for path, content in wanted:
            files.write_output(path, content)
    except OSError as error:
        raise ChartError(f"{file} can't be written", facts={"because": error.strerror or error}) from error
    return [path for path, _ in wanted]


def draw(title: str, segments: Sequence[Segment]) -> Picture:
    """Return the picture of all cases that have at least one side."""
    panels = [panel for segment in segments for panel in _panels(segment)]
    parts: list[Part] = []
    y = _write(parts, MARGIN + 14, title, size=TITLE, bold=True)
    y = _write(parts, y + 2, _subtitle(segments), size=NOTE, colour=FAINT)
    for current, longest in zip(panels, _scales(panels), strict=True):
        y = _draw_panel(parts, current, longest, y + 16)
    y += 28
    for line in _notes(segments):
        y = _write(parts, y, line, size=NOTE, colour=FAINT)
    height = y + MARGIN - 14
    background = Box(0, 0, WIDTH, height, "#ffffff", radius=8)
    return Picture(WIDTH, height, (background, *parts), title)


def _panels(segment: Segment) -> list[Panel]:
    served = [] if segment.serving is None else segment.serving["cases"]
    panels = [panel(result) for result in segment.results if result.timings]
    return panels + [panel for group in by_case(served) for panel in serving_panels(group)]


def serving_panels(group: Sequence[dict[str, Any]]) -> list[Panel]:
    """Return the panels of one load: the time per token over all requests, and the times in `figures.TIMES`."""
    rates = [Bar(case["side"], case["side"], *[1000 / case["rate"]] * 3) for case in group if case["rate"]]
    title = group[0]["title"]
    panels = [Panel(title, "ms per token, all requests together", "rate", None, tuple(rates))]
    for name, label in TIMES.items():
        times = [(case["side"], values) for case in group if (values := case["times"][name]) is not None]
        bars = tuple(Bar(side, side, values["median"], values["median"], values["p95"]) for side, values in times)
        panels.append(Panel(f"{title}: {label}", "ms", name, None, bars))
    return [panel for panel in panels if panel.bars]


def panel(result: Result) -> Panel:
    """Return one case as a panel, with its sides in the order of LABELS."""
    order = list(LABELS)
    timings = sorted(result.timings, key=lambda timing: order.index(timing.side))
    bars = tuple(Bar(timing.side, LABELS[timing.side], *timing.unit) for timing in timings)
    return Panel(result.case.title, result.case.unit, result.case.kind, result.floor.milliseconds, bars)


def _draw_panel(parts: list[Part], panel: Panel, longest: float, y: float) -> float:
    """Add one panel, scaled so that `longest` milliseconds reach from margin to margin. Returns its lower edge."""
    scale = (WIDTH - 2 * MARGIN) / longest
    unit = _END_TO_END if panel.kind == "decode" else panel.unit
    y = _write(parts, y + 10, panel.title, size=LABEL, bold=True)
    y = _write(parts, y, unit, size=NOTE, colour=FAINT) - 8
    stock = next((bar.value for bar in panel.bars if bar.side == STOCK), None)
    for bar in panel.bars:
        is_prepared = bar.side == PREPARED
        faster = "" if stock is None or bar.side == STOCK else f" ({stock / bar.value:.2f} ×)"
        number = f"{milliseconds(bar.value)} ms{faster}"
        parts.append(Words(MARGIN, y + 11, bar.label, size=LABEL, bold=is_prepared))
        parts.append(Words(WIDTH - MARGIN, y + 11, number, size=LABEL, anchor="end", bold=is_prepared))
        top = y + TEXT
        parts.append(Box(MARGIN, top, max(bar.value * scale, 1), BAR, COLOURS[bar.side], radius=2))
        low, high = MARGIN + bar.low * scale, MARGIN + bar.high * scale
        if high - low >= 1:
            middle = top + BAR / 2
            parts.append(Line(low, middle, high, middle, INK))
            parts.extend(Line(x, middle - 4, x, middle + 4, INK) for x in (low, high))
        if panel.floor is not None:
            line = MARGIN + panel.floor * scale
            parts.append(Line(line, top - 2, line, top + BAR + 2, FLOOR, dashed=True))
        y = top + BAR + GAP
    if panel.floor is None:
        return y
    words = f"roofline {milliseconds(panel.floor)}"
    half = CHARACTER * NOTE * len(words) / 2
    centre = min(max(MARGIN + panel.floor * scale, MARGIN + half), WIDTH - MARGIN - half)
    parts.append(Words(centre, y + 7, words, size=NOTE, colour=FLOOR, anchor="middle"))
    return y + 9


def _write(parts: list[Part], y: float, text: str, *, size: float, bold: bool = False, colour: str = INK) -> float:
    """Add the text, wrapped to the width of the picture, from the baseline y on. Returns the baseline below it."""
    columns = int((WIDTH - 2 * MARGIN) / (CHARACTER * size))
    for line in textwrap.wrap(text, columns, break_on_hyphens=False):
        parts.append(Words(MARGIN, y, line, size=size, bold=bold, colour=colour))
        y += size + 4.5
    return y


_END_TO_END = "ms per token, end to end through generate"


def _scales(panels: Sequence[Panel]) -> list[float]:
    """Return, for each panel, the time in milliseconds that spans its full width.

    This is the largest time in all panels of the same kind, unless some bars would then be too short to read.
    """
    longest = [max([panel.floor or 0.0, *(max(bar.value, bar.high) for bar in panel.bars)]) for panel in panels]
    scales = []
    for panel, own in zip(panels, longest, strict=True):
        kind = [value for other, value in zip(panels, longest, strict=True) if other.kind == panel.kind]
        scales.append(max(kind) if max(kind) <= 3 * min(kind) else own)
    return scales


def _subtitle(segments: Sequence[Segment]) -> str:
    least, most = (choose(segment.rounds for segment in segments) for choose in (min, max))
    rounds = f"{most} round{'' if most == 1 else 's'}" if least == most else f"{least} to {most} rounds"
    model = segments[0].model
    spread = f"median and quartiles of {rounds}"
    if segments[0].serving is not None:
        spread = "transformers serve over HTTP: median and 95th percentile"
    return f"{spread}; shorter is better; {model['dtype']}, {model['weights']} weights"


def _notes(segments: Sequence[Segment]) -> list[str]:
    """Return the paragraphs of the footer."""
    machine = segments[0].machine
    versions = [f"{name} {machine[name]}" for name in ("torch", "ROCm", "transformers", "triton") if name in machine]
    commits = sorted({segment.commit for segment in segments if segment.commit})
    forced = [] if "ROCm" in machine else ["hf_rocm forced: not an AMD GPU"]
    setup = [machine["device"], *versions, *([f"commit {', '.join(commits)}"] if commits else []), *forced]
    faster = "×: how many times as fast as stock."
    rates = [segment.rates for segment in segments if segment.rates is not None]
    if rates:
        copy, matmul = (_both_ends([getattr(rate, name) for rate in rates]) for name in ("copy", "matmul"))
        floor = f"Roofline: the time for a unit's bytes or operations at this machine's measured {copy}B/s (copy) "
        faster = f"{floor}and {matmul}FLOP/s (matmul). {faster}"
    return [", ".join(setup), faster]


def _both_ends(rates: Sequence[float]) -> str:
    low, high = large(min(rates)), large(max(rates))
    if low == high:
        return low
    number, prefix = low.split()
    return f"{number}–{high}" if high.endswith(prefix) else f"{low}–{high}"
