"""The hit rate that `explain` reports: the share of a model's GEMMs that are in the tables that aiter uses."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hf_rocm import options
from hf_rocm.device import describe
from hf_rocm.errors import HfRocmError
from hf_rocm.ops.aiter.tables import active, machine, store
from hf_rocm.ops.aiter.tables.merge import tuned_of
from hf_rocm.tools.tuning import shapes


@dataclass(frozen=True)
class Tuning:
    """The tuning state of a model.

    recorded: the number of shapes that `hf-rocm tune` recorded for the model; 0 if they or the tables can't be read.
    tuned: how many of these shapes have a tuned kernel in the tables that aiter uses; None if this is unknown, in which
    case `sentence` contains the reason.
    """

    recorded: int
    tuned: int | None
    sentence: str


def tuning_of(model: nn.Module) -> Tuning | None:
    """Return the tuning state of this model's GEMMs on this machine.

    Returns None if no shapes are recorded and the model is not on a ROCm device.
    """
    file = store.shapes(shapes.fingerprint(model))
    if not file.is_file():
        first = next(model.parameters(), None)
        if first is None or not describe(first.device).rocm:
            return None
        return Tuning(0, None, "no shapes are recorded (hf-rocm tune MODEL records and tunes them)")
    try:
        recorded = shapes.read(file)
        release, gpu = machine.installed(), machine.gpu()
        if release is None or gpu is None:
            missing = "aiter is not installed" if release is None else "this process has no AMD GPU under ROCm"
            return Tuning(len(recorded), None, f"{len(recorded)} shapes are recorded; {missing}")
        if not release.layout.reads_variable:
            return Tuning(len(recorded), None, f"amd-aiter {release.version} reads only its own table")
        table = active.combined(gpu, release, options.tuned_files())
    except HfRocmError as error:
        return Tuning(0, None, str(error))
    tuned = tuned_of(table, [shape.key(gpu.gfx, gpu.units) for shape in recorded])
    sentence = f"{tuned} of {len(recorded)} recorded shapes are in the table"
    if tuned < len(recorded):
        sentence += " (hf-rocm tune MODEL tunes the others)"
    return Tuning(len(recorded), tuned, sentence)
