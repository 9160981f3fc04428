"""`hf-rocm bench --tp N`: start N ranks that share one model, wait for them, and return the segment of rank 0.

The ranks are plain processes, and their store is in this process. So a failure of one rank is detected at once, even
while the others wait for it, and its exception or signal is reported. Then all ranks are stopped, and no result is
written.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hf_rocm import options
from hf_rocm.distributed import heads
from hf_rocm.errors import HfRocmError, OptionError, RankError
from hf_rocm.tools.bench import children, dummy_checkpoint
from hf_rocm.tools.bench.cases import Case
from hf_rocm.tools.bench.measure import Progress
from hf_rocm.tools.bench.record import Segment
from hf_rocm.tools.bench.run import Subject
from hf_rocm.tools.bench.shapes import architecture
from hf_rocm.tools.bench.variants import PREPARED, STOCK, UNCAPTURED

SIDES = (STOCK, UNCAPTURED, PREPARED)
# Errors that all ranks raise if one rank raises them.
_RAISED_BY_ALL_RANKS = ("Mismatch", "RankError")
_PAUSE = 0.05
# Seconds within which the other ranks must end after the first one has ended.
_GRACE = 60.0
_CHILD = """
from hf_rocm.tools.bench.rank import main
code = main(sys.argv[1], int(sys.argv[2]))
sys.stdout.flush(), sys.stderr.flush()
os._exit(code)
"""


def bench_ranks(
    subject: Subject,
    cases: Sequence[Case],
    names: Sequence[str],
    *,
    ranks: int,
    rounds: int,
    segment: str,
    progress: Progress,
) -> Segment:
    """Measure every case on every side, across `ranks` ranks on this machine with one GPU each (or all on the CPU).

    Raises `OptionError` or `RankError` before anything is started if such a run is impossible, and `RankError` with
    the cause if a rank failed or results are wrong.
    """
    check(subject, names, ranks)
    with tempfile.TemporaryDirectory(prefix="hf_rocm_bench_") as name:
        directory = Path(name)
        folder = subject.model
        dtype = subject.dtype or (torch.bfloat16 if subject.device.type == "cuda" else torch.float32)
        if subject.shape is not None:
            progress(f"{subject.name}: writing a dummy checkpoint")
            folder = str(directory / "checkpoint")
            dummy_checkpoint.write(Path(folder), subject.shape, dtype=dtype, layers=subject.layers)
        # the store is in this process, so that it outlives every rank and chooses a free port itself
        store: Any = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False
        )
        task = {
            "folder": folder,
            "blank": subject.shape is not None,
            "subject": {
                "model": subject.model,
                "shape": subject.shape,
                "device": subject.device.type,
                "dtype": str(dtype).removeprefix("torch."),
                "layers": subject.layers,
            },
            "cases": [list(case) for case in cases],
            "sides": list(names),
            "rounds": rounds,
            "segment": segment,
            "world": ranks,
            "port": store.port,
        }
        (directory / "task.json").write_text(json.dumps(task), encoding="utf-8")
        _follow(directory, subject, ranks, progress)
        result: dict[str, Any] = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    return Segment.from_dict(result)


def check(subject: Subject, names: Sequence[str], ranks: int) -> None:
    """Raise `OptionError` or `RankError` if the model, the sides or the GPUs don't allow a run across this many ranks.

    Starts no process.
    """
    if subject.encoder:
        raise OptionError(f"{subject.name} is an encoder", hint="--tp compares decoders; omit it")
    others = [name for name in names if name not in SIDES]
    if others:
        raise OptionError(
            f"the side {others[0]!r} is not compared across several ranks",
            facts={"known": ", ".join(SIDES)},
            hint="select others with --sides",
        )
    if subject.device.type == "cuda":
        available = torch.cuda.device_count()
        if subject.device.index:
            raise OptionError(
                "--tp uses the first GPUs of this machine",
                facts={"--device": subject.device},
                hint="omit --device, and select GPUs with HIP_VISIBLE_DEVICES (CUDA_VISIBLE_DEVICES on NVIDIA)",
            )
        if available < ranks:
            raise OptionError(
                f"--tp {ranks} needs {ranks} GPUs",
                facts={"found": available},
                hint=f"--tp {available}, or --device cpu to test the command" if available > 1 else "omit --tp",
            )
    heads.check(_config(subject), ranks, {"tp_plan": "auto"})


def _config(subject: Subject) -> Any:
    if subject.shape is not None:
        return architecture(subject.shape, layers=subject.layers)[1]
    from transformers import AutoConfig

    assert subject.model is not None
    try:
        return AutoConfig.from_pretrained(subject.model)
    except (OSError, ValueError):
        # Loading the model will raise the full error.
        return None


def _follow(directory: Path, subject: Subject, ranks: int, progress: Progress) -> None:
    """Start the ranks and wait until they end. Raises as soon as one has failed."""
    message = ""
    with _started(directory, subject, ranks) as processes:
        deadline = None
        while True:
            codes = [process.poll() for process in processes]
            if any(codes):
                raise _cause(directory, codes)
            if all(code == 0 for code in codes):
                return
            if deadline is None and 0 in codes:
                deadline = time.monotonic() + _GRACE
            if deadline is not None and time.monotonic() > deadline:
                stuck = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
                raise RankError(f"these ranks did not end with the others: {stuck}", hint="please report it")
            with contextlib.suppress(OSError):
                text = (directory / "progress").read_text(encoding="utf-8")
                if text != message:
                    message = text
                    progress(text)
            time.sleep(_PAUSE)


@contextmanager
def _started(directory: Path, subject: Subject, ranks: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the ranks' processes. Those that are still running at the end of the block are killed."""
    environment = options.environment()
    if subject.device.type == "cpu":
        # transformers places the shards on any visible accelerator.
        environment |= children.NO_GPU
        environment.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // ranks)))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            with (directory / f"log-{rank}").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        children.command(_CHILD, str(directory), str(rank)),
                        env=environment | _rank_environment(rank, ranks),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in processes:
            process.wait()


def _rank_environment(rank: int, ranks: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}


def _cause(directory: Path, codes: Sequence[int | None]) -> HfRocmError:
    """Return the error of the rank that failed first: a rank killed by a signal, else the one with the first error."""
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            return RankError(
                f"rank {rank} was killed by {children.signal_name(-code)}",
                facts={"last lines": children.tail(directory / f"log-{rank}")},
                hint="the Linux kernel kills processes that need too much memory (sudo dmesg | tail); "
                "a crash in a library leaves a message in the log",
            )
    errors = {}
    for rank in range(len(codes)):
        with contextlib.suppress(OSError, ValueError):
            errors[rank] = json.loads((directory / f"failed-{rank}.json").read_text(encoding="utf-8"))
    if not errors:
        rank, code = next((rank, code) for rank, code in enumerate(codes) if code)
        return RankError(
            f"rank {rank} ended with exit code {code}", facts={"last lines": children.tail(directory / f"log-{rank}")}
        )
    first = min(errors, key=lambda rank: errors[rank]["at"])
    first_error = errors[first]
    raised_by_all = first_error.get("error") in _RAISED_BY_ALL_RANKS
    return RankError(
        first_error["message"] if raised_by_all else f"rank {first} failed: {first_error['message']}",
        facts=first_error["facts"] or {"last lines": children.tail(directory / f"log-{first}")},
        hint=first_error["hint"] or "the same command without --tp shows whether it also fails on one device",
    )
