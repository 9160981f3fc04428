"""Tuning with PyTorch's TunableOp, where aiter doesn't apply: among the kernels of rocBLAS and hipBLASLt.

Its settings are those of the whole process, so they are put back as they were.
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
from hf_rocm.tuning import store
from hf_rocm.tuning.shapes import Gemm

Progress = Callable[[int, int], None]


def file_for(gfx: str) -> Path:
    """Where the results of this GPU, PyTorch and ROCm are."""
    return store.tunable(gfx, torch.__version__, torch.version.hip or "none")


def variables(file: Path) -> dict[str, str]:
    """What has to be set for PyTorch to use the results, and to measure nothing further."""
    return {
        "PYTORCH_TUNABLEOP_ENABLED": "1",
        "PYTORCH_TUNABLEOP_TUNING": "0",
        "PYTORCH_TUNABLEOP_FILENAME": str(file),
    }


def tune(shapes: Sequence[Gemm], file: Path, *, progress: Progress | None = None) -> list[Gemm]:
    """Run each product once under TunableOp's tuning, and add the results to `file`.

    Returns the shapes that there wasn't enough memory for. Raises `TuningError` without ROCm.
    """
    if torch.version.hip is None or not torch.cuda.is_available():
        raise TuningError("TunableOp needs an AMD GPU under ROCm")
    missing = []
    with scope(file, tuning=True) as settings:
        for number, shape in enumerate(shapes):
            if progress:
                progress(number, len(shapes))
            try:
                _product(shape)
            except torch.OutOfMemoryError:
                missing.append(shape)
                torch.cuda.empty_cache()
        torch.cuda.synchronize()
        store.write(file, results(settings))
    return missing


def results(settings: Any) -> str:
    """What TunableOp holds, as the text of its own files (of which releases write some now, some at exit)."""
    lines = [("Validator", *each) for each in settings.get_validators()] + list(settings.get_results())
    return "".join(",".join(map(str, line)) + "\n" for line in lines)


@contextmanager
def scope(file: Path, *, tuning: bool) -> Iterator[Any]:
    """TunableOp on with the results of this file, and afterwards as it was. The file is not written to."""
    import torch.cuda.tunable as settings

    before = (settings.is_enabled(), settings.tuning_is_enabled(), settings.get_filename())
    with tempfile.TemporaryDirectory() as aside:
        settings.enable(True)
        try:
            settings.tuning_enable(tuning)
            settings.set_filename(str(Path(aside) / "results.csv"))
            if file.is_file():
                settings.read_file(str(file))
            yield settings
        finally:
            settings.set_filename(before[2])
            settings.tuning_enable(before[1])
            settings.enable(before[0])


def _product(shape: Gemm) -> None:
    dtype = getattr(torch, shape.dtype.removeprefix("torch."))
    x = torch.randn(shape.m, shape.k, device="cuda", dtype=dtype)
    weight = torch.randn(shape.n, shape.k, device="cuda", dtype=dtype)
    F.linear(x, weight, torch.randn(shape.n, device="cuda", dtype=dtype) if shape.bias else None)
