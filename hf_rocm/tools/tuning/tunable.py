"""Tuning with PyTorch's TunableOp, which selects kernels of rocBLAS and hipBLASLt, for GPUs without aiter's kernels.

TunableOp's settings are global to the process and are restored afterwards.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from hf_rocm.errors import TuningError
from hf_rocm.ops.aiter.tables import store
from hf_rocm.tools.tuning.shapes import Gemm

Progress = Callable[[int, int], None]


def file_for(gfx: str) -> Path:
    """Return the path of the results for this GPU, PyTorch and ROCm."""
    return store.tunable(gfx, torch.__version__, torch.version.hip or "none")


def variables(file: Path) -> dict[str, str]:
    """Return the environment variables with which PyTorch uses the results without further tuning."""
    return {
        "PYTORCH_TUNABLEOP_ENABLED": "1",
        "PYTORCH_TUNABLEOP_TUNING": "0",
        "PYTORCH_TUNABLEOP_FILENAME": str(file),
    }


def tune(shapes: Sequence[Gemm], file: Path, *, progress: Progress | None = None) -> list[Gemm]:
    """Run every GEMM once with tuning enabled, and add the results to `file`.

    Returns the shapes that did not fit in memory. Raises `TuningError` if there is no AMD GPU under ROCm
    or if the file can't be written.
    """
    if torch.version.hip is None or not torch.cuda.is_available():
        raise TuningError("TunableOp needs an AMD GPU under ROCm")
    missing = []
    with scope(file, tuning=True) as settings:
        for number, shape in enumerate(shapes):
            if progress:
                progress(number, len(shapes))
            try:
                _gemm(shape)
            except torch.OutOfMemoryError:
                missing.append(shape)
                torch.cuda.empty_cache()
        torch.cuda.synchronize()
        store.write(file, results(settings))
    return missing


def results(settings: Any) -> str:
    """Return the results of TunableOp in the format of its files, which some releases write only at exit."""
    lines = [("Validator", *validator) for validator in settings.get_validators()] + list(settings.get_results())
    return "".join(",".join(map(str, line)) + "\n" for line in lines)


@contextmanager
def scope(file: Path, *, tuning: bool) -> Iterator[Any]:
    """Enable TunableOp with the results in this file, and restore its settings afterwards. The file is not changed."""
    import torch.cuda.tunable as settings

    before = (settings.is_enabled(), settings.tuning_is_enabled(), settings.get_filename())
    with tempfile.TemporaryDirectory() as folder:
        settings.enable(True)
        try:
            settings.tuning_enable(tuning)
            settings.set_filename(str(Path(folder) / "results.csv"))
            if file.is_file():
                settings.read_file(str(file))
            yield settings
        finally:
            settings.set_filename(before[2])
            settings.tuning_enable(before[1])
            settings.enable(before[0])


def _gemm(shape: Gemm) -> None:
    dtype = getattr(torch, shape.dtype.removeprefix("torch."))
    x = torch.randn(shape.m, shape.k, device="cuda", dtype=dtype)
    weight = torch.randn(shape.n, shape.k, device="cuda", dtype=dtype)
    F.linear(x, weight, torch.randn(shape.n, device="cuda", dtype=dtype) if shape.bias else None)
