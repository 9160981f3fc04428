"""The chart of a comparison: one panel a case, one bar a side, shorter is better, the floor as a line across."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hf_rocm.bench import drawing
from hf_rocm.bench.drawing import Box, ChartError, Line, Picture, Words
from hf_rocm.bench.measure import Result
from hf_rocm.bench.record import Segment, write_bytes, write_text
from hf_rocm.bench.report import large, milliseconds
from hf_rocm.bench.sides import COMPILE, LABELS, LIGER, OURS, OVERHEAD, STOCK, UNCAPTURED

COLOURS = {
    STOCK: "#b8c2cc",
    COMPILE: "#8795a1",
    OVERHEAD: "#606f7b",
    LIGER: "#d9b36c",
    UNCAPTURED: "#eab0a8",
    OURS: "#d1382b",
}
INK, FAINT = "#1f2933", "#66727f"

WIDTH, MARGIN = 860.0, 28.0
LABEL = 318.0  # where bars begin
END = 690.0  # where the longest bar ends: its figures stand behind it
BAR, GAP = 20.0, 7.0
FLOOR = "#2f855a"


class Bar(NamedTuple):
    """One side of a panel."""

    side: str
    label: str
    value: float


class Panel(NamedTuple):
    """One case. floor and values in the unit."""

    title: str
    unit: str
    kind: str
    floor: float
    bars: tuple[Bar, ...]


def check(file: Path) -> None:
    """Raise `ChartError` now if the chart could not be written there later."""
    if file.suffix not in ("", ".svg", ".png"):
        raise ChartError(
            f"a chart can't be written to {file.name}", hint="end its name in .svg or .png, or in neither for both"
        )
    if file.suffix == ".png" and not drawing.can_png():
        drawing.png(Picture(0, 0, (), ""))


def save(segments: Sequence[Segment], file: Path, *, title: str | None = None) -> list[Path]:
    """Draw the cases of segments of one model and machine. Returns the files written.

    file: with the ending .svg or .png, or with neither for both; then the PNG is left out where Pillow is missing.
    Raises `ChartError`.
    """
    check(file)
    picture = draw(title or f"{segments[0].model['name']} on {segments[0].machine['device']}", segments)
    written = []
    if file.suffix in ("", ".svg"):
        written.append(file.with_suffix(".svg"))
        write_text(written[-1], drawing.svg(picture))
    if file.suffix == ".png" or (file.suffix == "" and drawing.can_png()):
        written.append(file.with_suffix(".png"))
        write_bytes(written[-1], drawing.png(picture))
    return written


def draw(title: str, segments: Sequence[Segment]) -> Picture:
    """The picture of all cases that have at least one side."""
    panels = [panel(result) for segment in segments for result in segment.results if result.timings]
    parts: list[Box | Line | Words] = []
    y = MARGIN + 18
    parts.append(Words(MARGIN, y, title, size=19, bold=True))
    y += 22
    parts.append(Words(MARGIN, y, _subtitle(segments[0]), size=12.5, colour=FAINT))
    y += 12
    for each, longest in zip(panels, _scales(panels), strict=True):
        y = _draw_panel(parts, each, longest, y + 22)
    y += 26
    for line in _notes(segments):
        parts.append(Words(MARGIN, y, line, size=11.5, colour=FAINT))
        y += 16
    height = y + MARGIN - 22
    background = Box(0, 0, WIDTH, height, "#ffffff", radius=8)
    return Picture(WIDTH, height, (background, *parts), title)


def panel(result: Result) -> Panel:
    """One case as a panel, its sides in the order of LABELS."""
    order = list(LABELS)
    timings = sorted(result.timings, key=lambda each: order.index(each.side))
    bars = tuple(Bar(each.side, LABELS[each.side], each.unit.median) for each in timings)
    return Panel(result.case.title, result.case.unit, result.case.kind, result.floor.milliseconds, bars)


def _draw_panel(parts: list[Box | Line | Words], panel: Panel, longest: float, y: float) -> float:
    """Add one panel whose longest possible bar is worth `longest`; returns where it ends."""
    scale = (END - LABEL) / longest
    parts.append(Words(MARGIN, y + 10, panel.title, size=14, bold=True))
    top = y + 22
    stock = next((bar.value for bar in panel.bars if bar.side == STOCK), None)
    line = LABEL + panel.floor * scale
    bottom = top + len(panel.bars) * (BAR + GAP)
    y = top
    for bar in panel.bars:
        ours = bar.side == OURS
        end = LABEL + max(bar.value * scale, 1)
        parts.append(Words(LABEL - 10, y + 15, bar.label, size=12.5, anchor="end", bold=ours))
        parts.append(Box(LABEL, y, end - LABEL, BAR, COLOURS[bar.side], radius=2))
        faster = "" if stock is None or bar.side == STOCK else f"   {stock / bar.value:.2f} ×"
        text = f"{milliseconds(bar.value)} {panel.unit if bar is panel.bars[0] else 'ms'}{faster}"
        parts.append(Words(end + 8, y + 15, text, size=12.5, bold=ours))
        y += BAR + GAP
    parts.append(Line(line, top - 4, bottom, FLOOR, dashed=True))
    parts.append(Words(line, bottom + 12, f"floor {milliseconds(panel.floor)}", size=11, colour=FLOOR, anchor="middle"))
    return bottom + 14


def _scales(panels: Sequence[Panel]) -> list[float]:
    """The longest bar of each panel: shared by the panels of a kind, unless one of them would be a stub."""
    longest = [max([panel.floor, *(bar.value for bar in panel.bars)]) for panel in panels]
    scales = []
    for panel, own in zip(panels, longest, strict=True):
        kind = [value for other, value in zip(panels, longest, strict=True) if other.kind == panel.kind]
        scales.append(max(kind) if max(kind) <= 3 * min(kind) else own)
    return scales


def _subtitle(segment: Segment) -> str:
    decoding = any(result.case.kind == "decode" for result in segment.results)
    what = "milliseconds a token, end to end through generate" if decoding else "milliseconds"
    return f"{what}; shorter is better; {segment.model['dtype']}, {segment.model['weights']} weights"


def _notes(segments: Sequence[Segment]) -> list[str]:
    machine = segments[0].machine
    versions = [f"{name} {machine[name]}" for name in ("torch", "ROCm", "transformers", "triton") if name in machine]
    commits = sorted({each.commit for each in segments if each.commit})
    forced = [] if "ROCm" in machine else ["hf_rocm forced: not an AMD GPU"]
    where = [machine["device"], *versions, *([f"commit {', '.join(commits)}"] if commits else []), *forced]
    copy, matmul = (_both_ends([getattr(each.rates, name) for each in segments]) for name in ("copy", "matmul"))
    return [
        ", ".join(where),
        f"Floor: bytes or operations of one unit at this machine's measured {copy}B/s (copy) "
        f"and {matmul}FLOP/s (matmul). × : how much faster than stock.",
    ]


def _both_ends(rates: Sequence[float]) -> str:
    low, high = large(min(rates)), large(max(rates))
    if low == high:
        return low
    number, prefix = low.split()
    return f"{number}–{high}" if high.endswith(prefix) else f"{low}–{high}"
