"""The chart of the error per layer, for hf_rocm and for stock in the same dtype."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from hf_rocm.tools.drawing import Box, Curve, Dot, Line, Part, Picture, Words
from hf_rocm.tools.verify.check import LayerError

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 900, 434, 84, 98, 24, 92
_HF_ROCM, _STOCK, _ALLOWED, _INK, _GRID = "#c8102e", "#5b6770", "#d98e04", "#1d2329", "#dfe3e6"

_VERDICT = {True: "#2f855a", False: _HF_ROCM}


def picture(
    model: str, machine: Mapping[str, str], errors: Iterable[LayerError], verdict: str, *, passed: bool
) -> Picture:
    """Return the chart. Curves show the error accumulated up to a layer; dots show a layer alone, on stock's input."""
    layers = [layer for layer in errors if math.isfinite(layer.stock_travelled)]
    scale, title = _Scale(layers), f"{model}: error by layer"
    parts: list[Part] = [
        Box(0, 0, _WIDTH, _HEIGHT, "#ffffff"),
        Words(_LEFT, 26, title, size=16, colour=_INK),
        Words(_LEFT, 44, verdict, size=13, colour=_VERDICT[passed], bold=True),
        Words(_LEFT, 62, _subtitle(machine), size=12, colour=_STOCK),
        Words(_LEFT - 60, 84, "relative error of the worst position", size=12, colour=_INK),
        *scale.grid(),
        scale.curve([layer.stock_travelled for layer in layers], _STOCK, "stock, end to end"),
        scale.curve([layer.travelled for layer in layers], _HF_ROCM, "hf_rocm, end to end"),
        *scale.bounds([layer.allowed for layer in layers]),
    ]
    for index, layer in enumerate(layers):
        wrong = not layer.own <= layer.allowed
        x, y = scale.x(index), scale.y(layer.own)
        parts += [Dot(x, scale.y(layer.stock_own), 3, _STOCK), Dot(x, y, 6 if wrong else 3.5, _HF_ROCM)]
        if wrong:
            parts.append(Words(x + 9, y + 4, layer.layer, colour=_HF_ROCM))
    return Picture(_WIDTH, _HEIGHT, (*parts, *_legend()), title)


class _Scale:
    """The axes: layers from left to right, and the relative error upward on a logarithmic scale."""

    def __init__(self, layers: list[LayerError]) -> None:
        values = [
            value
            for layer in layers
            for value in (layer.travelled, layer.stock_travelled, layer.own, layer.stock_own, layer.allowed)
            if math.isfinite(value) and value > 0
        ]
        self.count = len(layers)
        self.low = math.floor(math.log10(min(values, default=1e-8)))
        self.high = max(self.low + 1, math.ceil(math.log10(max(values, default=1.0))))

    def x(self, index: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (index + 0.5) / max(1, self.count)

    def y(self, value: float) -> float:
        inside = self.high if not math.isfinite(value) else math.log10(value) if value > 0 else self.low
        share = (min(max(inside, self.low), self.high) - self.low) / (self.high - self.low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def grid(self) -> Iterator[Part]:
        for power in range(self.low, self.high + 1):
            y = self.y(10.0**power)
            yield Line(_LEFT, y, _WIDTH - _RIGHT, y, _GRID, width=1)
            yield Words(_LEFT - 10, y + 4, f"1e{power}", colour=_INK, anchor="end")
        for index in range(0, self.count, max(1, math.ceil(self.count / 24))):
            yield Words(self.x(index), _HEIGHT - _BOTTOM + 20, str(index), colour=_INK, anchor="middle")
        yield Words(self.x(self.count / 2 - 0.5), _HEIGHT - _BOTTOM + 42, "layer", colour=_INK, anchor="middle")

    def curve(self, values: list[float], colour: str, title: str) -> Curve:
        return Curve(tuple((self.x(index), self.y(value)) for index, value in enumerate(values)), colour, title)

    def bounds(self, values: list[float]) -> Iterator[Line]:
        """Yield the bound for each layer alone, as a short line."""
        half = (self.x(1) - self.x(0)) * 0.4
        for index, value in enumerate(values):
            x, y = self.x(index), self.y(value)
            yield Line(x - half, y, x + half, y, _ALLOWED, width=2)


def _legend() -> Iterator[Part]:
    y = _HEIGHT - 26
    # label → (colour, radius); radius 0 means a line
    marks: dict[str, tuple[str, float]] = {
        "hf_rocm, end to end": (_HF_ROCM, 0),
        "stock, end to end": (_STOCK, 0),
        "hf_rocm, layer alone": (_HF_ROCM, 3.5),
        "stock, layer alone": (_STOCK, 3),
        "allowed for a layer": (_ALLOWED, 0),
    }
    for index, (words, (colour, radius)) in enumerate(marks.items()):
        x = 30 + 174 * index
        yield Dot(x + 11, y, radius, colour) if radius else Line(x, y, x + 22, y, colour, width=2)
        yield Words(x + 28, y + 4, words, colour=_INK)


def _subtitle(machine: Mapping[str, str]) -> str:
    return f"{machine['dtype']} compared with {machine['reference']} on {machine['device']}, {machine['versions']}"
