"""Start N ranks over gloo on the CPU, as plain processes or under torchrun, and read their output.

Every process has a mark in its environment, so that leftover processes are found and killed whatever their parent is,
even after a failed test.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
MARK = "HF_ROCM_TEST_RUN"

# gloo runs on the CPU; if a GPU were visible, transformers would place the shards on it
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
_TORCHRUN_PREFIXES = ("TORCHELASTIC", "GROUP_", "ROLE_", "LOCAL_", "MASTER_")
_RANKS = {"RANK", "WORLD_SIZE"}


@dataclass(frozen=True)
class Result:
    """The result of one rank (or of torchrun, with the output of all its ranks), and its duration in seconds.

    code: the exit status; −9 is SIGKILL; None means that the process was killed at the timeout.
    left: from `torchrun` only, the command lines of processes of the run that were still running; they are killed.
    """

    code: int | None
    out: str
    error: str
    seconds: float
    left: tuple[str, ...] = ()

    @property
    def log(self) -> str:
        return self.out + self.error


Environ = Mapping[str, str] | Callable[[int], Mapping[str, str]]


def run_ranks(
    script: Path | str,
    *arguments: object,
    world: int = 2,
    environ: Environ | None = None,
    timeout: float = 300,
    ranks: Sequence[int] | None = None,
) -> list[Result]:
    """Start `script` once per rank, with RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and MASTER_*.

    Returns one result per rank.

    script: a path, the text of a program, or `-m`, with the module as the first argument. environ: additional
    variables, or a function that returns them for a rank. ranks: the ranks that are started, by default all. timeout:
    seconds for all ranks together.
    """
    ranks = range(world) if ranks is None else ranks
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with _program(script) as path, _marked() as mark:
        started = []
        for rank in ranks:
            own = environ(rank) if callable(environ) else environ or {}
            numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
            started.append(_start([path, *arguments], {**common, **numbers, **own}, mark))
        deadline = time.monotonic() + timeout
        return [process.result(deadline) for process in started]


def torchrun(
    script: Path | str,
    *arguments: object,
    world: int = 2,
    environ: Mapping[str, str] | None = None,
    timeout: float = 300,
    options: Sequence[str] = (),
) -> Result:
    """Start `script` through `python -m torch.distributed.run` on this machine; all ranks share one log."""
    start = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={world}"]
    with _program(script) as path, _marked() as mark:
        started = _start([*start, *options, path, *arguments], dict(environ or {}), mark)
        result = started.result(time.monotonic() + timeout)
        return Result(result.code, result.out, result.error, result.seconds, _left(mark))


def succeeded(results: Sequence[Result]) -> list[Result]:
    """Return the results if every rank exited with 0; otherwise fail with the last output of the failing ranks."""
    failed = [
        f"rank {n}: {failed_rank.code}\n{failed_rank.log[-3000:]}"
        for n, failed_rank in enumerate(results)
        if failed_rank.code != 0
    ]
    assert not failed, "\n".join(failed)
    return list(results)


def free_port() -> int:
    """An unused port below the ephemeral range, because other tests allocate ports from that range."""
    for port in random.SystemRandom().sample(range(15_000, 30_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")


@dataclass
class _Started:
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    error: IO[bytes]
    since: float

    def result(self, deadline: float) -> Result:
        code: int | None
        try:
            code = self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            code = None
        seconds = time.monotonic() - self.since
        return Result(code, _text(self.out), _text(self.error), seconds)


def _start(command: Sequence[object], environ: Mapping[str, str], mark: str) -> _Started:
    # files instead of pipes, so that a rank with much output does not block while another rank's output is read
    out, error = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - stays open as long as the process
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        env={**_base(), **environ, MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=error,
        start_new_session=True,
    )
    return _Started(process, out, error, time.monotonic())


def _base() -> dict[str, str]:
    """This process's environment and import path, with one thread, and without rank variables, GPUs and warnings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _RANKS and not name.startswith(_TORCHRUN_PREFIXES)
    }
    places = os.pathsep.join([*filter(None, sys.path), str(ROOT)])
    own = {"PYTHONPATH": places, "PYTHONWARNINGS": "ignore", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    return {**kept, **own, **_NO_GPU}


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    with file:
        return file.read().decode(errors="replace")


@contextmanager
def _program(script: Path | str) -> Iterator[Path]:
    if isinstance(script, Path) or "\n" not in script:
        yield Path(script)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.py")
        path.write_text(script, encoding="utf-8")
        yield path


@contextmanager
def _marked() -> Iterator[str]:
    mark = uuid.uuid4().hex
    try:
        yield mark
    finally:
        for pid in _marked_processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _left(mark: str, patience: float = 5.0) -> tuple[str, ...]:
    """The command lines of processes with this mark that are still running after a grace period."""
    deadline = time.monotonic() + patience
    while (processes := _marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return tuple(processes.values())


def _marked_processes(mark: str) -> dict[int, str]:
    needle = f"{MARK}={mark}".encode()
    processes = {}
    for place in Path("/proc").glob("[0-9]*"):
        # Skip processes that have ended or belong to another user.
        with contextlib.suppress(OSError):
            if needle in (place / "environ").read_bytes().split(b"\0"):
                processes[int(place.name)] = (
                    (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
    return processes
