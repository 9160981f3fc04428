"""The demo's processes. Each run loads a model in a new Python process and writes its results to a folder."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from lib.console import ScriptError, columns, echo, quoted, step, styled, wrapped
from lib.demo_environment import DEMO
from lib.environments import ROOT, Environment, clean_environ


class Way(NamedTuple):
    """One way to run a model: the name of its column, how the worker loads it, and whether HF_ROCM_FORCE is set."""

    title: str
    load: str
    forced: bool


WAYS = {
    "stock": Way("stock", "stock", forced=False),
    "inert": Way("installed, inert", "stock", forced=False),
    "forced": Way("HF_ROCM_FORCE=1", "stock", forced=True),
    "loader": Way("from_pretrained(force=True)", "loader", forced=False),
}


class Runs:
    """Starts the processes and reads their results. workloads: command of the worker → checkpoint."""

    def __init__(self, environment: Environment, workloads: dict[str, Path]) -> None:
        self.environment = environment
        self.workloads = workloads

    def run(self, way: str) -> None:
        """Run every workload in one way, in new processes that run at the same time."""
        title, load, forced = WAYS[way]
        environ = {"HF_ROCM_FORCE": "1"} if forced else {}

        def start(command: str) -> None:
            self._worker(command, load, self.workloads[command], _folder(command, way), **environ)

        with step(f"{title}: {' and '.join(self.workloads)}"):
            self._at_once(start)

    def _at_once(self, start: Callable[[str], None]) -> None:
        """Call `start` with every workload, in parallel. Raises the first error after all calls have ended."""
        with ThreadPoolExecutor() as pool:
            for done in [pool.submit(start, command) for command in self.workloads]:
                done.result()

    def result(self, command: str, way: str) -> dict[str, Any]:
        data: dict[str, Any] = json.loads((_folder(command, way) / "result.json").read_text())
        return data

    def results(self, command: str) -> dict[str, dict[str, Any]]:
        return {way: self.result(command, way) for way in WAYS}

    def judge(self) -> None:
        """Compare the results of every way with stock's, and with a reference in float64."""

        def start(command: str) -> None:
            folders = [_folder(command, way) for way in WAYS]
            self._worker("judge", command, self.workloads[command], _folder(command, "verdict"), *folders)

        with step("the reference in float64"):
            self._at_once(start)

    def verdict(self, command: str) -> dict[str, dict[str, Any]]:
        """By dtype: the tolerance, and lists in the order of `WAYS`, such as the differences from stock."""
        verdict = self.result(command, "verdict")
        return {dtype: result for dtype, result in verdict.items() if isinstance(result, dict)}

    def shown(self, *words: str) -> None:
        """Run a command as users do, and show its output."""
        echo(f"  {styled('$ ' + ' '.join(words), 'cyan')}")
        output = self.output([self.environment.path / "bin" / words[0], *words[1:]])
        quoted(output)

    def output(self, command: Sequence[str | Path], **environ: str) -> str:
        words = [str(word) for word in command]
        result = subprocess.run(
            words,
            cwd=DEMO,
            env=_environ(**environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            end = "\n".join(f"  | {text}" for text in (result.stdout + result.stderr).strip().splitlines()[-20:])
            raise ScriptError(f"a step of the demo failed\n  command  {' '.join(words)}\n{end}")
        return result.stdout

    def _worker(self, *words: str | Path, **environ: str) -> None:
        self.output([self.environment.python, ROOT / "scripts" / "demo_worker.py", *words], **environ)


@contextmanager
def background(environment: Environment, *words: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Run a Python process during other steps. It is killed at the end of the block. `show` prints its output."""
    command = [str(environment.python), "-u", *map(str, words)]
    process = subprocess.Popen(
        command,
        cwd=DEMO,
        env=_environ(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def show(process: subprocess.Popen[str], *, name: str) -> None:
    """Print the process's output so far, then new lines as they appear. Raises `ScriptError` if the process failed."""
    output: IO[str] | None = process.stdout
    for text in output or ():
        echo("\n".join(wrapped(text.rstrip())))
    if process.wait():
        raise ScriptError(f"{name} ended with exit code {process.returncode}")


def _folder(command: str, way: str) -> Path:
    return DEMO / "runs" / f"{command}-{way}"


def _environ(**changes: str) -> dict[str, str]:
    """The environment of a process: no access to the Hub, no progress bars, and one thread, because two processes run
    at once."""
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return clean_environ(OMP_NUM_THREADS="1", COLUMNS=str(columns() - 4), **quiet, **changes)
