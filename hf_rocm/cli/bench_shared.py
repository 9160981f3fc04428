"""Shared code of the `hf-rocm bench` commands: the measured model, and the files that they write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hf_rocm.cli.output import check_output, print_notice
from hf_rocm.errors import OptionError
from hf_rocm.tools.bench.known_shapes import shape

if TYPE_CHECKING:
    from hf_rocm.tools.bench.record import Segment
    from hf_rocm.tools.bench.run import Subject


def subject_of(
    model: str | None, config: str | None, device: str | None, dtype: str | None, layers: int | None
) -> Subject:
    """Return the model that these options name. Raises `OptionError` or `BadParameter`."""
    import torch

    from hf_rocm.tools.bench.run import Subject
    from hf_rocm.tools.load import device_named

    if (model is None) == (config is None):
        raise typer.BadParameter("pass a MODEL, or a known shape with --config")
    if config is not None:
        shape(config)
    if layers is not None and config is None:
        raise typer.BadParameter("--layers needs --config")
    kind = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and kind not in (torch.bfloat16, torch.float16, torch.float32):
        raise OptionError(f"--dtype {dtype} is not valid", facts={"allowed": "bfloat16, float16, float32"})
    return Subject(model, config, device_named(device), kind, layers)


def check_files(save: Path | None, chart: Path | None = None, profile: Path | None = None) -> None:
    """Before a measurement of several minutes, raise an `HfRocmError` if a result can't be written to these files."""
    from hf_rocm.tools.bench import chart as charts
    from hf_rocm.tools.bench import record

    for output in (save, chart, profile):
        if output is not None:
            check_output(output, parents=True)
    if save is not None:
        record.load(save)
    if chart is not None:
        charts.check(chart)


def draw(segment: Segment, file: Path) -> None:
    """Write the chart of a segment, and print the path of every written file, and why a PNG was not written."""
    from hf_rocm.tools import drawing
    from hf_rocm.tools.bench import chart as charts

    for written in charts.save([segment], file):
        print(f"chart: {written}", file=sys.stderr)
    if file.suffix == "" and not drawing.can_png():
        print_notice(f"{file.with_suffix('.png')} was not written: it needs Pillow (pip install pillow)")
