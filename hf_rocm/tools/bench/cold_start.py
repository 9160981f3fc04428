"""The cost of a start: the time and memory of the first generation in a fresh process, with cold and warm caches.

Every start runs in a separate process, since compiled code and allocated memory would affect the next one. Two
consecutive starts share the cache folders of Triton, PyTorch and hf_rocm: the first is cold, and the second is warm.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hf_rocm import files, options
from hf_rocm.errors import HfRocmError
from hf_rocm.ops import probe
from hf_rocm.tools.bench import inputs
from hf_rocm.tools.bench import rates as machine_rates
from hf_rocm.tools.bench.cases import Case
from hf_rocm.tools.bench.clock import now
from hf_rocm.tools.bench.generating import generate_once
from hf_rocm.tools.bench.machine import commit, machine
from hf_rocm.tools.bench.measure import Progress
from hf_rocm.tools.bench.record import Segment
from hf_rocm.tools.bench.roofline import cache_bytes
from hf_rocm.tools.bench.run import Subject, describe, sides_of
from hf_rocm.tools.bench.variants import PREPARED, UNCAPTURED

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HF_ROCM_CACHE")


class StartError(HfRocmError):
    """A fresh process failed."""


def starts(subject: Subject, case: Case, sides: Sequence[str], *, segment: str, progress: Progress) -> Segment:
    """Start each side twice: with empty caches on disk, and with the caches from the first start."""
    rows = []
    for side in sides:
        with tempfile.TemporaryDirectory(prefix="hf_rocm_bench_") as folder:
            for caches in ("cold", "cached"):
                progress(f"{case.title}: starting {side}, {caches}")
                rows.append({"side": side, "caches": caches, **start(subject, case, side, Path(folder))})
    first = rows[0]
    rates = machine_rates.measure(subject.device, getattr(torch, first["model"]["dtype"]))
    model = first["model"]
    for row in rows:
        del row["model"]
    return Segment(segment, machine(subject.device), commit(), model, rates, 1, starts=tuple(rows))


def start(subject: Subject, case: Case, side: str, folder: Path) -> dict[str, Any]:
    """Measure one start, in a process whose on-disk caches are in `folder`. Raises `StartError` if it fails."""
    output = folder / "output.json"
    output.unlink(missing_ok=True)
    task = {
        "model": subject.model,
        "shape": subject.shape,
        "device": str(subject.device),
        "dtype": None if subject.dtype is None else str(subject.dtype).removeprefix("torch."),
        "layers": subject.layers,
        "case": list(case),
        "side": side,
        "output": str(output),
    }
    environment = {**options.environment(), **{name: str(folder / name.lower()) for name in CACHES}}
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from hf_rocm.tools.bench.cold_start import child; child(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(task)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode or not output.exists():
        lines = done.stderr.strip().splitlines() or ["nothing"]
        raise StartError(
            f"a fresh process with {side} failed",
            facts={
                "case": case.title,
                "exit code": done.returncode,
                "last lines": " / ".join(line.strip() for line in lines[-3:])[:400],
            },
            hint="`hf-rocm bench` with --sides shows whether that side runs",
        )
    result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return result


def child(text: str) -> None:
    """Measure one start and write the result. This is the entry point of the fresh process."""
    task = json.loads(text)
    dtype = None if task["dtype"] is None else getattr(torch, task["dtype"])
    device = torch.device(task["device"])
    subject = Subject(task["model"], task["shape"], device, dtype, task["layers"])
    case = Case(*task["case"])
    files.write(Path(task["output"]), json.dumps(_measure(subject, case, task["side"])))


def _measure(subject: Subject, case: Case, name: str) -> dict[str, Any]:
    """Return the facts about the model, the time of each stage in seconds, and the memory in bytes.

    warmup: the time of the first generation minus that of the third, at least 0. peak, reserved: None on the CPU.
    """
    device = subject.device
    began = time.perf_counter()
    if name in (PREPARED, UNCAPTURED):
        # `hf_rocm.from_pretrained` does the same.
        probe.ahead()
    model = subject.load()
    (side,), _ = sides_of(model, subject, [name])
    ready = now(device)
    ids = inputs.tokens(model, case.batch, case.prompt)
    with torch.no_grad(), side.turn():
        first, _, later = (generate_once(side, ids, case) for _ in range(3))
    return {
        "model": describe(subject, model),
        "prepared": ready - began,
        "first_call": first.whole,
        "later_call": later.whole,
        "warmup": max(0.0, first.whole - later.whole),
        "first_token": first.first,
        "later_first_token": later.first,
        "peak": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "reserved": torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
        "weights": sum({parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}.values()),
        "static_cache": cache_bytes(model, case),
    }
