"""The error by layer as an SVG: what hf_rocm adds beside what the dtype costs stock."""

from __future__ import annotations

import math
from html import escape

from hf_rocm.diagnostics.verify.report import LayerError, Verification

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 900, 420, 84, 64, 24, 92
_OURS, _STOCK, _ALLOWED, _INK, _GRID = "#c8102e", "#5b6770", "#d98e04", "#1d2329", "#dfe3e6"


def picture(found: Verification) -> str:
    """Solid: the error as it travels through the model. Dots: each layer by itself, on stock's own input."""
    layers = [each for each in found.layers if math.isfinite(each.stock_travelled)]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="13" fill="{_INK}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="26" font-size="16">{escape(found.model)}: error by layer</text>',
        f'<text x="{_LEFT}" y="46" font-size="12" fill="{_STOCK}">{escape(_subtitle(found))}</text>',
    ]
    scale = _Scale(layers)
    lines += scale.grid()
    lines += _curve(scale, [each.stock_travelled for each in layers], _STOCK, "stock, end to end")
    lines += _curve(scale, [each.travelled for each in layers], _OURS, "hf_rocm, end to end")
    lines += _steps(scale, [each.allowed for each in layers])
    for place, each in enumerate(layers):
        wrong = not each.own <= each.allowed
        lines.append(_dot(scale, place, each.stock_own, _STOCK, 3.0))
        lines.append(_dot(scale, place, each.own, _OURS, 6.0 if wrong else 3.5, each.layer if wrong else ""))
    return "\n".join([*lines, *_legend(), "</svg>", ""])


class _Scale:
    """Layers to the right, the relative error upward, in powers of ten."""

    def __init__(self, layers: list[LayerError]) -> None:
        values = [v for each in layers for v in (each.travelled, each.stock_travelled, each.own, each.stock_own,
                                                 each.allowed) if math.isfinite(v) and v > 0]  # fmt: skip
        self.count = len(layers)
        self.low = math.floor(math.log10(min(values, default=1e-8)))
        self.high = max(self.low + 1, math.ceil(math.log10(max(values, default=1.0))))

    def x(self, place: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (place + 0.5) / max(1, self.count)

    def y(self, value: float) -> float:
        inside = self.high if not math.isfinite(value) else math.log10(value) if value > 0 else self.low
        share = (min(max(inside, self.low), self.high) - self.low) / (self.high - self.low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def grid(self) -> list[str]:
        lines = []
        for power in range(self.low, self.high + 1):
            y = self.y(10.0**power)
            lines.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="{_GRID}"/>')
            lines.append(f'<text x="{_LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
        every = max(1, math.ceil(self.count / 24))
        for place in range(0, self.count, every):
            lines.append(
                f'<text x="{self.x(place):.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{place}</text>'
            )
        lines.append(f'<text x="{self.x(self.count / 2 - 0.5):.1f}" y="{_HEIGHT - _BOTTOM + 42}" '
                     'text-anchor="middle">layer</text>')  # fmt: skip
        middle = (_TOP + _HEIGHT - _BOTTOM) / 2
        lines.append(f'<text transform="translate(22 {middle:.0f}) rotate(-90)" text-anchor="middle">'
                     "worst position's relative error</text>")  # fmt: skip
        return lines


def _curve(scale: _Scale, values: list[float], colour: str, title: str) -> list[str]:
    points = " ".join(f"{scale.x(place):.1f},{scale.y(value):.1f}" for place, value in enumerate(values))
    return [
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"><title>{title}</title></polyline>'
    ]


def _steps(scale: _Scale, values: list[float]) -> list[str]:
    """The bound of each layer by itself, a short line at its place."""
    half = (scale.x(1) - scale.x(0)) * 0.4
    return [
        f'<line x1="{scale.x(place) - half:.1f}" x2="{scale.x(place) + half:.1f}" y1="{scale.y(value):.1f}" '
        f'y2="{scale.y(value):.1f}" stroke="{_ALLOWED}" stroke-width="2"/>'
        for place, value in enumerate(values)
    ]


def _dot(scale: _Scale, place: int, value: float, colour: str, radius: float, name: str = "") -> str:
    x, y = scale.x(place), scale.y(value)
    dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>'
    return f'{dot}<text x="{x + 9:.1f}" y="{y + 4:.1f}" fill="{colour}">{escape(name)}</text>' if name else dot


def _legend() -> list[str]:
    y = _HEIGHT - 22
    entries = [
        (f'<line x1="0" x2="22" y1="-4" y2="-4" stroke="{_OURS}" stroke-width="2"/>', "hf_rocm, end to end"),
        (f'<line x1="0" x2="22" y1="-4" y2="-4" stroke="{_STOCK}" stroke-width="2"/>', "stock, end to end"),
        (f'<circle cx="11" cy="-4" r="3.5" fill="{_OURS}"/>', "hf_rocm, layer by itself"),
        (f'<circle cx="11" cy="-4" r="3" fill="{_STOCK}"/>', "stock, layer by itself"),
        (f'<line x1="0" x2="22" y1="-4" y2="-4" stroke="{_ALLOWED}" stroke-width="2"/>', "allowed by itself"),
    ]
    return [
        f'<g transform="translate({30 + 174 * place} {y})">{mark}<text x="28">{words}</text></g>'
        for place, (mark, words) in enumerate(entries)
    ]


def _subtitle(found: Verification) -> str:
    machine = found.machine
    return f"{machine['dtype']} beside {machine['reference']} on {machine['device']}, {machine['versions']}"
