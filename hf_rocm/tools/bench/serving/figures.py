"""The figures of a case: tokens per second, times to the first token and between tokens, and errors by kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from hf_rocm.tools.bench.clock import percentiles
from hf_rocm.tools.bench.report import Row, milliseconds
from hf_rocm.tools.bench.serving.client import Response
from hf_rocm.tools.bench.serving.traffic import Load, Traffic
from hf_rocm.tools.bench.variants import PREPARED, STOCK

# The times of a case: key in its figures → label in tables and charts.
TIMES = {
    "first": "time to first token",
    "between": "time between tokens",
    "whole": "time to complete answer",
}


def figures(load: Load, side: str, traffic: Traffic) -> dict[str, Any]:
    """Return the figures of one case on one side as plain data.

    Failed responses are counted only in `errors`, and abandoned ones only in `left`.
    rate: tokens per second over all requests, from the first request to the last response. first: the time from a
    request to the first piece of text in a streamed response. between: the time from one piece to the next. whole: the
    time from a request to the end of its response, streamed or not.
    """
    answered = [response for response in traffic.responses if response.error is None and not response.left]
    tokens = sum(response.tokens for response in answered)
    streamed = [response for response in answered if response.pieces]
    gaps = [after - before for response in streamed for before, after in pairwise(response.pieces)]
    times = {
        "first": [response.pieces[0] - response.sent for response in streamed],
        "between": gaps,
        "whole": [response.ended - response.sent for response in answered],
    }
    return {
        "load": asdict(load),
        "title": load.title,
        "side": side,
        "seconds": traffic.seconds,
        "answered": len(answered),
        "unsent": traffic.unsent,
        "left": sum(response.left for response in traffic.responses),
        "errors": _errors(traffic.responses),
        "prompt_tokens": sum(response.prompt for response in answered),
        "tokens": tokens,
        "streamed_tokens": sum(response.tokens for response in streamed),
        "pieces": sum(len(response.pieces) for response in streamed),
        "rate": tokens / traffic.seconds if traffic.seconds > 0 else 0.0,
        "times": {
            name: None if (stats := percentiles(values)) is None else stats._asdict() for name, values in times.items()
        },
    }


def _errors(responses: Iterable[Response]) -> dict[str, dict[str, Any]]:
    """Return the number of errors of each kind, and the detail of the first one."""
    errors: dict[str, dict[str, Any]] = {}
    for response in responses:
        if response.error is not None:
            errors.setdefault(response.error, {"count": 0, "example": response.detail})["count"] += 1
    return errors


def by_case(cases: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group the figures by load, with stock first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        groups.setdefault(case["title"], []).append(case)
    return [sorted(group, key=lambda case: (STOCK, PREPARED).index(case["side"])) for group in groups.values()]


def table(group: Sequence[dict[str, Any]]) -> tuple[Row, list[Row]]:
    """Return the header and rows for one load: a column per side and, if there are two, one for the ratio to stock."""
    both = len(group) == 2
    rows = [_row("tokens per second", [f"{case['rate']:.{0 if case['rate'] >= 100 else 1}f}" for case in group],
                 _ratio(group[-1]["rate"], group[0]["rate"]) if both else "")]  # fmt: skip
    for name, label in TIMES.items():
        times = [case["times"][name] for case in group]
        if any(times):
            cells = [
                "" if stats is None else " / ".join(milliseconds(value) for value in stats.values()) for stats in times
            ]
            better = _ratio(times[0]["median"], times[-1]["median"]) if both and all(times) else ""
            rows.append(_row(f"{label}, ms", cells, better))
    rows.append(_row("answers", [str(case["answered"]) for case in group]))
    rows.append(_row("errors", [str(sum(kind["count"] for kind in case["errors"].values())) for case in group]))
    return ("", *(case["side"] for case in group), *(["× stock"] if both else [])), [
        row if both else row[:-1] for row in rows
    ]


def notes(group: Sequence[dict[str, Any]]) -> list[str]:
    """Return notes on errors by kind, abandoned streams, requests that were not sent, and pieces of several tokens."""
    lines = []
    for case in group:
        side = case["side"]
        lines += [
            f"{side}: {kind['count']} × {name}, first: {kind['example']}" for name, kind in case["errors"].items()
        ]
        if case.get("left"):
            streams = "stream was" if case["left"] == 1 else "streams were"
            lines.append(
                f"{side}: {case['left']} {streams} abandoned by the client, and not included in any other figure"
            )
        if case["unsent"]:
            requests = "request was" if case["unsent"] == 1 else "requests were"
            lines.append(f"{side}: {case['unsent']} {requests} not sent within {case['load']['seconds']:g} s")
    joined = [f"{case['pieces']} of {case['streamed_tokens']} ({case['side']})" for case in group
              if case["pieces"] < case["streamed_tokens"]]  # fmt: skip
    if joined:
        lines.append(f"fewer pieces of text than streamed tokens: {', '.join(joined)}; times are those between pieces")
    return lines


def _row(label: str, cells: Sequence[str], better: str = "") -> Row:
    return (label, *cells, better)


def _ratio(numerator: float, denominator: float) -> str:
    return f"{numerator / denominator:.2f}" if denominator else ""
