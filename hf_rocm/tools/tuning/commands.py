"""The implementation of `hf-rocm tune MODEL`: record the shapes of the model's GEMMs, and tune kernels for them.

It prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_rocm.errors import OptionError, TuningError
from hf_rocm.ops.aiter.tables import machine, store
from hf_rocm.ops.aiter.tables.machine import Gpu, Release
from hf_rocm.tools.tuning import engines
from hf_rocm.tools.tuning import shapes as shape_files
from hf_rocm.tools.tuning.shapes import Gemm

Progress = Callable[[int, int], None]

AITER, TUNABLE = "aiter", "tunableop"


@dataclass
class Tuning:
    """A tuning job.

    shapes: all recorded shapes that the engine supports. left_out: the other shapes. done: shapes that were tuned
    before. todo: the remaining shapes, or all shapes if they are to be tuned again. file: the file with the shapes.
    obstacle: the reason why the shapes can't be tuned here, or None.
    """

    name: str
    engine: str
    release: Release
    gpu: Gpu | None
    shapes: list[Gemm]
    left_out: list[Gemm]
    file: Path
    obstacle: str | None
    done: set[Gemm] = field(default_factory=set)
    todo: list[Gemm] = field(default_factory=list)

    @property
    def commands(self) -> dict[str, list[str]]:
        """The commands to tune the shapes on another machine, with hf-rocm or, for aiter, only with aiter's sources."""
        lines = {"with hf-rocm": ["hf-rocm", "tune", "--shapes", str(self.file)]}
        if self.engine == AITER:
            release = Release(self.release.version, self.release.layout)
            lines["with aiter's sources alone"] = engines.command(release, self.file, "tuned.csv")
        else:
            lines["with hf-rocm"] += ["--engine", TUNABLE]
        return lines

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "engine": self.engine,
            "release": self.release.version,
            "gpu": None if self.gpu is None else self.gpu._asdict(),
            "shapes": [{**shape._asdict(), "tuned": shape in self.done} for shape in self.shapes],
            "left_out": [shape._asdict() for shape in self.left_out],
            "file": str(self.file),
            "todo": len(self.todo),
            "obstacle": self.obstacle,
            "commands": self.commands,
        }


@dataclass(frozen=True)
class Result:
    """The result of a tuner run. variables: the variables that enable the table, if hf_rocm doesn't enable it."""

    tuned: int
    missing: list[Gemm]
    table: Path
    log: Path | None = None
    variables: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "tuned": self.tuned,
            "missing": [shape._asdict() for shape in self.missing],
            "table": str(self.table),
            "log": None if self.log is None else str(self.log),
            "variables": self.variables,
        }


def prepare(
    model: str | None,
    *,
    batches: Sequence[int],
    prompts: Sequence[int],
    dtype: str | None = None,
    engine: str | None = None,
    shuffled: bool = False,
    shapes: Path | None = None,
    output: Path | None = None,
    load: bool = False,
    again: bool = False,
    release: str | None = None,
    gpu: str | None = None,
    progress: Progress | None = None,
) -> Tuning:
    """Record the GEMMs of `model`, or read them from the file `shapes`, and determine which of them to tune.

    Only shapes that the engine supports are kept. Those of `model` are written to the cache, from which `explain` reads
    them. If `output` is given, the shapes of either source are also written there.
    """
    target, target_gpu = machine.release(release), machine.gpu(gpu)
    chosen = _engine(engine, target_gpu)
    fingerprint = None
    if shapes is not None:
        recorded = shape_files.read(shapes)
    else:
        assert model is not None
        recorded, fingerprint = _recorded(model, batches, prompts, dtype, load, progress)
    if shuffled:
        recorded = sorted({*recorded, *(shape._replace(shuffled=True) for shape in recorded if _shufflable(shape))})
    kept = [shape for shape in recorded if chosen != AITER or engines.supports(shape)]
    if not kept:
        raise TuningError(
            "aiter's tuned kernels support none of these GEMMs",
            facts={"supported": "bf16 and fp16, with K a multiple of 8", "found": _kinds(recorded)},
            hint="if you run the model in bf16, pass --dtype bfloat16",
        )
    text = shape_files.write(kept, target.layout)
    file = output or shapes
    if fingerprint is not None:
        store.write(store.shapes(fingerprint), text)
        store.record_name(fingerprint, str(model))
        file = output or store.shapes(fingerprint)
    assert file is not None
    if output is not None:
        store.write_output(output, text)
    left_out = [shape for shape in recorded if shape not in kept]
    job = Tuning(model or str(shapes), chosen, target, target_gpu, kept, left_out, file, None)
    job.obstacle = _obstacle(job, named=release is not None or gpu is not None)
    if chosen == AITER and target_gpu is not None:
        known = engines.known(target_gpu, target)
        job.done = {shape for shape in kept if shape.key(target_gpu.gfx, target_gpu.units) in known}
    job.todo = kept if again else [shape for shape in kept if shape not in job.done]
    return job


def run(job: Tuning, *, progress: Progress | None = None) -> Result:
    """Tune the job's remaining shapes. The job must not have an obstacle."""
    assert job.gpu is not None
    if job.engine == AITER:
        outcome = engines.tune(job.todo, job.gpu, job.release, progress=progress)
        return Result(outcome.tuned, outcome.missing, outcome.table, outcome.log)
    from hf_rocm.tools.tuning import tunable

    file = tunable.file_for(job.gpu.gfx)
    missing = tunable.tune(job.todo, file, progress=progress)
    return Result(len(job.todo) - len(missing), missing, file, None, tunable.variables(file))


def no_gpu() -> str | None:
    """Return the reason why nothing can be tuned in this process, or None if it has an AMD GPU under ROCm."""
    from hf_rocm.device import is_rocm

    return None if is_rocm() and machine.gpu() is not None else "this process has no AMD GPU under ROCm"


def _recorded(
    model: str,
    batches: Sequence[int],
    prompts: Sequence[int],
    dtype: str | None,
    load: bool,
    progress: Progress | None,
) -> tuple[list[Gemm], str]:
    from hf_rocm.tools.tuning.record import loaded, record, without_weights

    with loaded(model, dtype=dtype) if load else without_weights(model, dtype=dtype) as built:
        return record(built, batches, prompts, progress=progress), shape_files.fingerprint(built)


def _engine(named: str | None, gpu: Gpu | None) -> str:
    from hf_rocm.ops.aiter.detect import INSTINCT

    if named not in (None, AITER, TUNABLE):
        raise OptionError(f"there is no engine {named!r}", facts={"engines": f"{AITER}, {TUNABLE}"})
    if named is not None:
        return named
    return AITER if gpu is None or gpu.gfx in INSTINCT else TUNABLE


def _obstacle(job: Tuning, *, named: bool) -> str | None:
    """Return the reason why this job can't be tuned on this machine, or None if it can be tuned."""
    if (missing := no_gpu()) is not None or job.gpu is None:
        return missing or "this process has no AMD GPU under ROCm"
    if named and (machine.gpu(), machine.installed()) != (job.gpu, job.release):
        return "the specified GPU or release is not that of this machine"
    if job.engine == TUNABLE:
        return None
    if job.release.folder is None:
        return "aiter is not installed (pip install amd-aiter; or --engine tunableop)"
    if not job.release.layout.reads_variable:
        return f"amd-aiter {job.release.version} reads only the table in its own package: pip install -U amd-aiter"
    return None


def _shufflable(shape: Gemm) -> bool:
    return shape.dtype == "torch.bfloat16" and not (shape.n % 64 or shape.k % 64)


def _kinds(shapes: Sequence[Gemm]) -> str:
    kinds = sorted({(shape.dtype.removeprefix("torch."), shape.k) for shape in shapes})
    return ", ".join(f"{dtype} with K = {k}" for dtype, k in kinds) or "no linear layer was run"
