"""Segments: what one run measured, with everything that a reader needs beside it, kept in a JSON file.

A run of a whole matrix is a file of segments, each with its own baseline, so that one can be repeated without the rest.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_rocm.bench.cases import Case
from hf_rocm.bench.clock import Spread
from hf_rocm.bench.floor import Floor
from hf_rocm.bench.measure import Result, Timing
from hf_rocm.bench.parity import Parity
from hf_rocm.bench.rates import Rates
from hf_rocm.errors import HfRocmError

FORMAT = 1


class RecordError(HfRocmError):
    """A file of segments can't be read."""


@dataclass(frozen=True)
class Segment:
    """One run: where, of what, at which rates, with which results. Kernels and starts are plain rows of their own."""

    name: str
    machine: dict[str, str]
    commit: str | None
    model: dict[str, Any]
    rates: Rates
    rounds: int
    missing: dict[str, str] = field(default_factory=dict)  # sides that could not be had, and why
    results: tuple[Result, ...] = ()
    kernels: tuple[dict[str, Any], ...] = ()
    starts: tuple[dict[str, Any], ...] = ()
    parallel: dict[str, Any] | None = None  # of ranks that share the model: how many, over what, what they exchange

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "machine": self.machine,
            "commit": self.commit,
            "model": self.model,
            "rates": self.rates._asdict(),
            "rounds": self.rounds,
            "missing": self.missing,
            "results": [_result_to_dict(each) for each in self.results],
            "kernels": list(self.kernels),
            "starts": list(self.starts),
            **({} if self.parallel is None else {"parallel": self.parallel}),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Segment:
        return cls(
            data["name"],
            data["machine"],
            data["commit"],
            data["model"],
            Rates(**data["rates"]),
            data["rounds"],
            data["missing"],
            tuple(_result_from_dict(each) for each in data["results"]),
            tuple(data["kernels"]),
            tuple(data["starts"]),
            data.get("parallel"),
        )


def load(file: Path) -> list[Segment]:
    """The segments of a file; none if there is no such file. Raises `RecordError` on one that isn't ours."""
    if not file.exists():
        return []
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise RecordError(
                f"{file.name} was written by another hf-rocm",
                facts={"file": file, "expected": f"format {FORMAT}", "found": data["format"]},
                hint="measure again into another file",
            )
        return [Segment.from_dict(each) for each in data["segments"]]
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(
            f"{file.name} is not a file of measurements",
            facts={"file": file, "problem": f"{type(error).__name__}: {error}"},
            hint="name a file that `hf-rocm bench --save` wrote, or a new one",
        ) from error


def save(file: Path, segment: Segment) -> None:
    """Add a segment to a file, in the place of an older one of that name."""
    segments = [each for each in load(file) if each.name != segment.name]
    write(file, [*segments, segment])


def write(file: Path, segments: Sequence[Segment]) -> None:
    """Write a file of segments in one step."""
    text = json.dumps({"format": FORMAT, "segments": [each.to_dict() for each in segments]}, indent=1)
    write_text(file, text + "\n")


def write_text(file: Path, text: str) -> None:
    """Replace a file at once, or not at all."""
    write_bytes(file, text.encode())


def write_bytes(file: Path, data: bytes) -> None:
    """Replace a file at once, or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def named(segment: Segment, name: str) -> Segment:
    """The same segment under another name."""
    return replace(segment, name=name)


def _result_to_dict(result: Result) -> dict[str, Any]:
    return {
        "case": result.case._asdict(),
        "floor": _floor_to_dict(result.floor),
        "timings": [_timing_to_dict(each) for each in result.timings],
        "left_out": result.left_out,
    }


def _floor_to_dict(floor: Floor) -> dict[str, Any]:
    """Without what only ranks have, for those who read results of one device."""
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
        tuple(_timing_from_dict(each) for each in data["timings"]),
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
        data.get("replay"),  # not in files of before it was measured
    )
