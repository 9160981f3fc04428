"""Charts as lists of rectangles, lines, curves, dots and words, written as SVG or, if Pillow is installed, as PNG."""

from __future__ import annotations

import io
from collections.abc import Iterator
from html import escape
from importlib.util import find_spec
from typing import Any, NamedTuple

from hf_rocm.errors import HfRocmError

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
# Pixels of the PNG per unit.
SCALE = 2


class Box(NamedTuple):
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    radius: float = 0


class Line(NamedTuple):
    """A straight line from (x, y) to (to_x, to_y). Dashed lines must be vertical, with y < to_y."""

    x: float
    y: float
    to_x: float
    to_y: float
    colour: str
    width: float = 1.5
    dashed: bool = False


class Curve(NamedTuple):
    """A line through points (x, y). title: the tooltip in the SVG."""

    points: tuple[tuple[float, float], ...]
    colour: str
    title: str
    width: float = 2


class Dot(NamedTuple):
    """A filled circle around (x, y)."""

    x: float
    y: float
    radius: float
    fill: str


class Words(NamedTuple):
    """One line of text; y is its baseline. anchor: `start`, `middle` or `end`."""

    x: float
    y: float
    text: str
    size: float = 13
    colour: str = "#1f2933"
    anchor: str = "start"
    bold: bool = False


Part = Box | Line | Curve | Dot | Words


class Picture(NamedTuple):
    """A picture: its width and height in units, its parts from back to front, and the title of the SVG."""

    width: float
    height: float
    parts: tuple[Part, ...]
    description: str


class ChartError(HfRocmError):
    """A chart can't be drawn or written."""


def svg(picture: Picture) -> str:
    """Return the picture as an SVG document."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {picture.width:g} {picture.height:g}" '
        f'width="{picture.width:g}" height="{picture.height:g}" font-family="{escape(FONT)}" role="img">',
        f"<title>{escape(picture.description)}</title>",
        *(_element(part) for part in picture.parts),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def can_png() -> bool:
    """Return whether Pillow is installed."""
    return find_spec("PIL") is not None


def png(picture: Picture) -> bytes:
    """Return the picture as a PNG file. Raises `ChartError` without Pillow."""
    if not can_png():
        raise ChartError(
            "a PNG can't be written: Pillow is not installed",
            hint="pip install pillow, or specify a file with the suffix .svg, which needs no package",
        )
    from PIL import Image, ImageDraw

    size = (round(picture.width * SCALE), round(picture.height * SCALE))
    image = Image.new("RGB", size, "white")
    canvas = ImageDraw.Draw(image)
    for part in picture.parts:
        _paint(canvas, part)
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    return stream.getvalue()


def _element(part: Part) -> str:
    if isinstance(part, Box):
        return (
            f'<rect x="{part.x:.1f}" y="{part.y:.1f}" width="{part.width:.1f}" height="{part.height:.1f}" '
            f'rx="{part.radius:g}" fill="{part.fill}"/>'
        )
    if isinstance(part, Line):
        dash = ' stroke-dasharray="4 3"' if part.dashed else ""
        return (
            f'<line x1="{part.x:.1f}" y1="{part.y:.1f}" x2="{part.to_x:.1f}" y2="{part.to_y:.1f}" '
            f'stroke="{part.colour}" stroke-width="{part.width:g}"{dash}/>'
        )
    if isinstance(part, Curve):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in part.points)
        style = f'fill="none" stroke="{part.colour}" stroke-width="{part.width:g}"'
        return f'<polyline points="{points}" {style}><title>{escape(part.title)}</title></polyline>'
    if isinstance(part, Dot):
        return f'<circle cx="{part.x:.1f}" cy="{part.y:.1f}" r="{part.radius:g}" fill="{part.fill}"/>'
    weight = ' font-weight="600"' if part.bold else ""
    return (
        f'<text x="{part.x:.1f}" y="{part.y:.1f}" font-size="{part.size:g}" fill="{part.colour}" '
        f'text-anchor="{part.anchor}"{weight}>{escape(part.text)}</text>'
    )


def _paint(canvas: Any, part: Part) -> None:
    if isinstance(part, Box):
        corners = [part.x, part.y, part.x + part.width, part.y + part.height]
        canvas.rounded_rectangle(_scaled(corners), radius=SCALE * part.radius, fill=part.fill)
    elif isinstance(part, Line):
        for top, bottom in _dashes(part):
            ends = _scaled([part.x, top, part.to_x, bottom])
            canvas.line(ends, fill=part.colour, width=round(part.width * SCALE))
    elif isinstance(part, Curve):
        canvas.line(_scaled([place for point in part.points for place in point]), fill=part.colour,
                    width=round(part.width * SCALE), joint="curve")  # fmt: skip
    elif isinstance(part, Dot):
        left, top = part.x - part.radius, part.y - part.radius
        canvas.ellipse(_scaled([left, top, part.x + part.radius, part.y + part.radius]), fill=part.fill)
    else:
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[part.anchor]
        position = (SCALE * part.x, SCALE * part.y)
        canvas.text(position, part.text, fill=part.colour, font=_font(SCALE * part.size, part.bold), anchor=anchor)


def _scaled(places: list[float]) -> list[float]:
    return [SCALE * place for place in places]


def _dashes(line: Line) -> Iterator[tuple[float, float]]:
    if not line.dashed:
        yield line.y, line.to_y
        return
    top = line.y
    while top < line.to_y:
        yield top, min(top + 4, line.to_y)
        top += 7


def _font(size: float, bold: bool) -> Any:
    from PIL import ImageFont

    for name in ("DejaVuSans-Bold.ttf",) if bold else ("DejaVuSans.ttf",):
        try:
            # The size is reduced, because DejaVu is wider than other fonts.
            return ImageFont.truetype(name, 0.92 * size)
        except OSError:
            continue
    return ImageFont.load_default(size)
