"""`hf-rocm bench --tp N`: starts N ranks that share one model, follows them, and brings back what rank 0 recorded.

They are plain processes with a store of ours, so that the end of one is seen at once, whatever the others wait for, and
has a name: what it raised, or the signal that ended it. Then all are ended, and nothing is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hf_rocm import options
from hf_rocm.bench import blank
from hf_rocm.bench.cases import Case
from hf_rocm.bench.measure import Progress
from hf_rocm.bench.record import Segment
from hf_rocm.bench.run import Subject
from hf_rocm.bench.shapes import architecture
from hf_rocm.bench.sides import OURS, STOCK, UNCAPTURED
from hf_rocm.errors import HfRocmError, OptionError, RankError
from hf_rocm.ranks import heads

SIDES = (STOCK, UNCAPTURED, OURS)
_ALIKE = ("Mismatch", "RankError")  # what every rank raises if one does
_PAUSE = 0.05
_LAST_WORDS = 60.0  # seconds for the other ranks to end after the first one has
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
_CHILD = """
import ctypes, os, sys
if sys.platform == "linux":  # a rank must not outlive the command that started it, however that ends
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != {parent}:
        os._exit(1)
sys.path[:] = {path!r}
from hf_rocm.bench.rank import main
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
    """Measure every case on every side, over `ranks` ranks of this machine with one GPU each (or the CPU for all).

    Raises `OptionError` before anything is started, where that can't be; `RankError` where a rank failed, with its
    cause; `Mismatch` where numbers are wrong.
    """
    check(subject, names, ranks)
    with tempfile.TemporaryDirectory(prefix="hf_rocm_bench_") as name:
        place = Path(name)
        folder = subject.model
        dtype = subject.dtype or (torch.bfloat16 if subject.device.type == "cuda" else torch.float32)
        if subject.shape is not None:
            progress(f"{subject.name}: writing a checkpoint without matrices")
            folder = str(place / "checkpoint")
            blank.write(Path(folder), subject.shape, dtype=dtype, layers=subject.layers)
        # a store of this process outlives every rank, and its port is free for certain
        store: Any = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False
        )
        question = {
            "folder": folder,
            "blank": subject.shape is not None,
            "subject": {
                "model": subject.model,
                "shape": subject.shape,
                "device": subject.device.type,
                "dtype": str(dtype).removeprefix("torch."),
                "layers": subject.layers,
            },
            "cases": [list(each) for each in cases],
            "sides": list(names),
            "rounds": rounds,
            "segment": segment,
            "world": ranks,
            "port": store.port,
        }
        (place / "question.json").write_text(json.dumps(question), encoding="utf-8")
        _follow(place, subject, ranks, progress)
        answer: dict[str, Any] = json.loads((place / "answer.json").read_text(encoding="utf-8"))
    return Segment.from_dict(answer)


def check(subject: Subject, names: Sequence[str], ranks: int) -> None:
    """Raise `OptionError` or `RankError` on what can't be shared by so many ranks here. Starts nothing."""
    if subject.encoder:
        raise OptionError(f"{subject.name} is an encoder", hint="--tp compares decoders; leave it out")
    others = [name for name in names if name not in SIDES]
    if others:
        raise OptionError(
            f"the side {others[0]!r} is not compared over several ranks",
            facts={"known": ", ".join(SIDES)},
            hint="name others with --sides",
        )
    if subject.device.type == "cuda":
        there = torch.cuda.device_count()
        if subject.device.index:
            raise OptionError(
                "--tp takes the first GPUs of this machine",
                facts={"--device": subject.device},
                hint="leave --device out, and choose with HIP_VISIBLE_DEVICES (CUDA_VISIBLE_DEVICES on NVIDIA)",
            )
        if there < ranks:
            raise OptionError(
                f"--tp {ranks} needs {ranks} GPUs",
                facts={"found": there},
                hint=f"--tp {there}, or --device cpu to see that it works" if there > 1 else "leave --tp out",
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
        return None  # loading it will say why, in full


def _follow(place: Path, subject: Subject, ranks: int, progress: Progress) -> None:
    """Start the ranks and wait for their end; raise as soon as one has failed."""
    told = ""
    with _started(place, subject, ranks) as processes:
        deadline = None
        while True:
            codes = [each.poll() for each in processes]
            if any(codes):
                raise _cause(place, codes)
            if all(code == 0 for code in codes):
                return
            if deadline is None and 0 in codes:
                deadline = time.monotonic() + _LAST_WORDS
            if deadline is not None and time.monotonic() > deadline:
                stuck = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
                raise RankError(f"rank {stuck} did not end with the others", hint="run it again, and report it")
            with contextlib.suppress(OSError):
                words = (place / "progress").read_text(encoding="utf-8")
                if words != told:
                    told = words
                    progress(words)
            time.sleep(_PAUSE)


@contextmanager
def _started(place: Path, subject: Subject, ranks: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The ranks' processes; whatever still runs at the end is ended."""
    environment = options.environment()
    if subject.device.type == "cpu":
        environment |= _NO_GPU  # transformers shards over whatever accelerator it sees
        environment.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // ranks)))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            with (place / f"log-{rank}").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", _CHILD.format(path=sys.path, parent=os.getpid()), str(place), str(rank)],
                        env=environment | _numbers(rank, ranks),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield processes
    finally:
        for each in processes:
            with contextlib.suppress(ProcessLookupError):
                each.kill()
        for each in processes:
            each.wait()


def _numbers(rank: int, ranks: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}


def _cause(place: Path, codes: Sequence[int | None]) -> HfRocmError:
    """Who failed first and why: a rank that a signal ended, else the earliest that said something."""
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            return RankError(
                f"rank {rank} was ended by {_signal(-code)}",
                facts={"its last words": _tail(place / f"log-{rank}")},
                hint="the kernel ends what needs more memory than there is (sudo dmesg | tail); "
                "a crash in a library leaves a message above",
            )
    said = {}
    for rank in range(len(codes)):
        with contextlib.suppress(OSError, ValueError):
            said[rank] = json.loads((place / f"failed-{rank}.json").read_text(encoding="utf-8"))
    if not said:
        rank, code = next((rank, code) for rank, code in enumerate(codes) if code)
        return RankError(
            f"rank {rank} ended with exit code {code}", facts={"its last words": _tail(place / f"log-{rank}")}
        )
    first = min(said, key=lambda rank: said[rank]["at"])
    told = said[first]
    alike = told.get("error") in _ALIKE
    return RankError(
        told["message"] if alike else f"rank {first} failed: {told['message']}",
        facts=told["facts"] or {"its last words": _tail(place / f"log-{first}")},
        hint=told["hint"] or "the same without --tp shows whether it takes several ranks",
    )


def _signal(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _tail(log: Path) -> str:
    """The last lines that say something, on one line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-3:])[-400:] or "none"
