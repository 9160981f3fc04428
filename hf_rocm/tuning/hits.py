"""The hit rate that `explain` tells: how many of a model's products are in the table that aiter is given."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hf_rocm import options
from hf_rocm.device import describe
from hf_rocm.errors import HfRocmError
from hf_rocm.tuning import active, machine, shapes, store
from hf_rocm.tuning.merge import tuned_of


@dataclass(frozen=True)
class Tuning:
    """recorded: the shapes that `hf-rocm tune` saw in this model. found: those that aiter has a tuned kernel for.

    found is None where that can't be said, and why is in the sentence.
    """

    recorded: int
    found: int | None
    sentence: str


def tuning_of(model: nn.Module) -> Tuning | None:
    """What is known about this model's products on this machine; None where there is nothing to tune."""
    file = store.shapes(shapes.fingerprint(model))
    if not file.is_file():
        first = next(model.parameters(), None)
        if first is None or not describe(first.device).rocm:
            return None
        return Tuning(0, None, "no shapes are recorded (hf-rocm tune MODEL does that, and tunes them)")
    try:
        recorded = shapes.read(file)
        release, gpu = machine.installed(), machine.gpu()
        if release is None or gpu is None:
            where = "aiter" if release is None else "AMD GPU under ROCm"
            return Tuning(len(recorded), None, f"{len(recorded)} shapes are recorded; there is no {where} here")
        if not release.layout.reads_variable:
            return Tuning(len(recorded), None, f"amd-aiter {release.version} reads no table but its own")
        table = active.combined(gpu, release, options.tuned_files())
    except HfRocmError as error:
        return Tuning(0, None, str(error))
    found = tuned_of(table, [each.key(gpu.gfx, gpu.units) for each in recorded])
    sentence = f"{found} of {len(recorded)} recorded shapes are in the table"
    if found < len(recorded):
        sentence += " (hf-rocm tune MODEL tunes the others)"
    return Tuning(len(recorded), found, sentence)
