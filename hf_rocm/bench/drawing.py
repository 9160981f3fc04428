"""A picture as a list of rectangles, lines and words: written as SVG by ourselves, and as PNG where Pillow is there."""

from __future__ import annotations

import io
from collections.abc import Iterator
from html import escape
from importlib.util import find_spec
from typing import Any, NamedTuple

from hf_rocm.errors import HfRocmError

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
SCALE = 2  # pixels of the PNG for each unit


class Box(NamedTuple):
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    radius: float = 0


class Line(NamedTuple):
    """An upright line."""

    x: float
    top: float
    bottom: float
    colour: str
    dashed: bool = False


class Words(NamedTuple):
    """One line of text; y is its baseline. anchor: `start`, `middle` or `end`."""

    x: float
    y: float
    text: str
    size: float = 13
    colour: str = "#1f2933"
    anchor: str = "start"
    bold: bool = False


class Picture(NamedTuple):
    """Width and height in units, and what is drawn, from the back to the front."""

    width: float
    height: float
    parts: tuple[Box | Line | Words, ...]
    description: str


class ChartError(HfRocmError):
    """A chart can't be drawn here."""


def svg(picture: Picture) -> str:
    """The picture as an SVG document."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {picture.width:g} {picture.height:g}" '
        f'width="{picture.width:g}" height="{picture.height:g}" font-family="{escape(FONT)}" role="img">',
        f"<title>{escape(picture.description)}</title>",
        *(_element(part) for part in picture.parts),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def can_png() -> bool:
    """Whether Pillow is installed."""
    return find_spec("PIL") is not None


def png(picture: Picture) -> bytes:
    """The picture as a PNG file. Raises `ChartError` without Pillow."""
    if not can_png():
        raise ChartError(
            "a PNG can't be written: Pillow is not installed",
            hint="pip install pillow, or name a file that ends in .svg, which needs nothing",
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


def _element(part: Box | Line | Words) -> str:
    if isinstance(part, Box):
        return (
            f'<rect x="{part.x:.1f}" y="{part.y:.1f}" width="{part.width:.1f}" height="{part.height:.1f}" '
            f'rx="{part.radius:g}" fill="{part.fill}"/>'
        )
    if isinstance(part, Line):
        dash = ' stroke-dasharray="4 3"' if part.dashed else ""
        return (
            f'<line x1="{part.x:.1f}" y1="{part.top:.1f}" x2="{part.x:.1f}" y2="{part.bottom:.1f}" '
            f'stroke="{part.colour}" stroke-width="1.5"{dash}/>'
        )
    weight = ' font-weight="600"' if part.bold else ""
    return (
        f'<text x="{part.x:.1f}" y="{part.y:.1f}" font-size="{part.size:g}" fill="{part.colour}" '
        f'text-anchor="{part.anchor}"{weight}>{escape(part.text)}</text>'
    )


def _paint(canvas: Any, part: Box | Line | Words) -> None:
    if isinstance(part, Box):
        corners = [part.x, part.y, part.x + part.width, part.y + part.height]
        canvas.rounded_rectangle([SCALE * each for each in corners], radius=SCALE * part.radius, fill=part.fill)
    elif isinstance(part, Line):
        for top, bottom in _dashes(part):
            ends = [(SCALE * part.x, SCALE * top), (SCALE * part.x, SCALE * bottom)]
            canvas.line(ends, fill=part.colour, width=round(1.5 * SCALE))
    else:
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[part.anchor]
        position = (SCALE * part.x, SCALE * part.y)
        canvas.text(position, part.text, fill=part.colour, font=_font(SCALE * part.size, part.bold), anchor=anchor)


def _dashes(line: Line) -> Iterator[tuple[float, float]]:
    if not line.dashed:
        yield line.top, line.bottom
        return
    top = line.top
    while top < line.bottom:
        yield top, min(top + 4, line.bottom)
        top += 7


def _font(size: float, bold: bool) -> Any:
    from PIL import ImageFont

    for name in ("DejaVuSans-Bold.ttf",) if bold else ("DejaVuSans.ttf",):
        try:
            return ImageFont.truetype(name, 0.92 * size)  # it runs wide
        except OSError:
            continue
    return ImageFont.load_default(size)
