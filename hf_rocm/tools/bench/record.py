"""Segments: the results of single runs with the facts that they depend on, stored in a JSON file.

A file of segments can contain a whole matrix of runs. Every segment has its own baseline and can be repeated alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_rocm import files
from hf_rocm.errors import HfRocmError
from hf_rocm.tools.bench.cases import Case
from hf_rocm.tools.bench.clock import Spread
from hf_rocm.tools.bench.measure import Result, Timing
from hf_rocm.tools.bench.parity import Parity
from hf_rocm.tools.bench.rates import Rates
from hf_rocm.tools.bench.roofline import Floor

FORMAT = 1


class RecordError(HfRocmError):
    """A file of segments can't be read or written."""


@dataclass(frozen=True)
class Segment:
    """One run: machine, model, rates and results.

    rates: None if the results have no roofline. kernels: the lines of `bench ops`. starts: the cold and warm starts of
    each side. Both contain plain dicts.
    """

    name: str
    machine: dict[str, str]
    commit: str | None
    model: dict[str, Any]
    rates: Rates | None
    rounds: int
    # Unavailable side → reason.
    missing: dict[str, str] = field(default_factory=dict)
    results: tuple[Result, ...] = ()
    kernels: tuple[dict[str, Any], ...] = ()
    starts: tuple[dict[str, Any], ...] = ()
    # For several ranks: their number, interconnect and collectives.
    parallel: dict[str, Any] | None = None
    # for `bench serve`: the server's command, parity, `explain`'s sentences about batches and recorded steps, and the
    # figures of cases
    serving: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "machine": self.machine,
            "commit": self.commit,
            "model": self.model,
            "rates": None if self.rates is None else self.rates._asdict(),
            "rounds": self.rounds,
            "missing": self.missing,
            "results": [_result_to_dict(result) for result in self.results],
            "kernels": list(self.kernels),
            "starts": list(self.starts),
            **({} if self.parallel is None else {"parallel": self.parallel}),
            **({} if self.serving is None else {"serving": self.serving}),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Segment:
        return cls(
            data["name"],
            data["machine"],
            data["commit"],
            data["model"],
            None if data["rates"] is None else Rates(**data["rates"]),
            data["rounds"],
            data["missing"],
            tuple(_result_from_dict(item_data) for item_data in data["results"]),
            tuple(data["kernels"]),
            tuple(data["starts"]),
            data.get("parallel"),
            data.get("serving"),
        )


def load(file: Path) -> list[Segment]:
    """Return the segments of a file; none if it does not exist. Raises `RecordError` if its content is not valid."""
    # A FIFO or /dev/null has no segments.
    if not files.is_file(file):
        return []
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise RecordError(
                f"{file.name} was written by another release of hf-rocm",
                facts={"file": file, "expected": f"format {FORMAT}", "found": data["format"]},
                hint="measure again, and save to another file",
            )
        return [Segment.from_dict(item) for item in data["segments"]]
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(
            f"{file.name} is not a file of measurements",
            facts={"file": file, "problem": f"{type(error).__name__}: {error}"},
            hint="specify a file that `hf-rocm bench --save` wrote, or a new one",
        ) from error


def save(file: Path, segment: Segment) -> None:
    """Add a segment to a file. An older segment with the same name is replaced."""
    segments = [item for item in load(file) if item.name != segment.name]
    write(file, [*segments, segment])


def write(file: Path, segments: Sequence[Segment]) -> None:
    """Write a file of segments; a regular file is replaced atomically. Raises `RecordError`."""
    text = json.dumps({"format": FORMAT, "segments": [segment.to_dict() for segment in segments]}, indent=1)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write_output(file, text + "\n")
    except OSError as error:
        raise RecordError(f"{file} can't be written", facts={"because": error.strerror or error}) from error


def named(segment: Segment, name: str) -> Segment:
    """Return the same segment under another name."""
    return replace(segment, name=name)


def _result_to_dict(result: Result) -> dict[str, Any]:
    return {
        "case": result.case._asdict(),
        "floor": _floor_to_dict(result.floor),
        "timings": [_timing_to_dict(timing) for timing in result.timings],
        "left_out": result.left_out,
    }


def _floor_to_dict(floor: Floor) -> dict[str, Any]:
    """Leave out `exchange` if it is 0, since results from a single device have no such field."""
    return {name: value for name, value in floor._asdict().items() if name != "exchange" or value}


def _timing_to_dict(timing: Timing) -> dict[str, Any]:
    data = timing._asdict()
    for name in ("unit", "first", "parity"):
        data[name] = None if data[name] is None else data[name]._asdict()
    return {**data, "rounds": list(timing.rounds)}


def _result_from_dict(data: dict[str, Any]) -> Result:
    return Result(
        Case(**data["case"]),
        Floor(**data["floor"]),
        tuple(_timing_from_dict(item) for item in data["timings"]),
        data["left_out"],
    )


def _timing_from_dict(data: dict[str, Any]) -> Timing:
    return Timing(
        data["side"],
        Spread(**data["unit"]),
        None if data["first"] is None else Spread(**data["first"]),
        data["warmup"],
        data["peak"],
        tuple(data["rounds"]),
        None if data["parity"] is None else Parity(**data["parity"]),
        data["note"],
        # This key is absent in older files.
        data.get("replay"),
    )
