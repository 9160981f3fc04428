"""The demo's processes: each run loads a model in a new Python and leaves what it found in a folder."""

from __future__ import annotations

import json
import subprocess
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lib.console import ScriptError, say, step, styled
from lib.demo_environment import DEMO
from lib.environments import ROOT, Environment, clean_environ


class Way(NamedTuple):
    """One way to run a model: what its column is called, how the worker loads, whether HF_ROCM_FORCE is set."""

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
    """Starts the processes and reads what they left. workloads: command of the worker → checkpoint."""

    def __init__(self, environment: Environment, workloads: dict[str, Path]) -> None:
        self.environment = environment
        self.workloads = workloads

    def run(self, way: str) -> None:
        """Every workload one way, each in a new process."""
        title, load, forced = WAYS[way]
        environ = {"HF_ROCM_FORCE": "1"} if forced else {}
        for command, checkpoint in self.workloads.items():
            with step(f"{command}, {title}: a new process"):
                self._worker(command, load, checkpoint, _folder(command, way), **environ)

    def result(self, command: str, way: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((_folder(command, way) / "result.json").read_text())
        return found

    def results(self, command: str) -> dict[str, dict[str, Any]]:
        return {way: self.result(command, way) for way in WAYS}

    def judge(self, command: str) -> dict[str, dict[str, Any]]:
        """Differences from stock for each dtype, in the order of `WAYS`, and what is allowed."""
        folders = [_folder(command, way) for way in WAYS]
        with step("the reference in float64"):
            self._worker("judge", command, self.workloads[command], _folder(command, "verdict"), *folders)
        verdict = self.result(command, "verdict")
        return {dtype: found for dtype, found in verdict.items() if isinstance(found, dict)}

    def in_view(self, *words: str | Path) -> None:
        """A Python process that writes to this terminal."""
        command = [str(self.environment.python), *map(str, words)]
        done = subprocess.run(command, cwd=DEMO, env=_environ(), stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise ScriptError(f"{Path(words[0]).name} ended with exit code {done.returncode}")

    def shown(self, *words: str) -> None:
        """A command as users call it, with its output."""
        say(f"  {styled('$ ' + ' '.join(words), 'cyan')}")
        output = self.output([self.environment.path / "bin" / words[0], *words[1:]])
        say(textwrap.indent(output.strip(), "  │ ", lambda _: True))

    def output(self, command: Sequence[str | Path], **environ: str) -> str:
        words = [str(word) for word in command]
        done = subprocess.run(
            words,
            cwd=DEMO,
            env=_environ(**environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            end = "\n".join(f"  | {text}" for text in (done.stdout + done.stderr).strip().splitlines()[-20:])
            raise ScriptError(f"a step of the demo failed\n  command  {' '.join(words)}\n{end}")
        return done.stdout

    def _worker(self, *words: str | Path, **environ: str) -> None:
        self.output([self.environment.python, ROOT / "scripts" / "demo_worker.py", *words], **environ)


def _folder(command: str, way: str) -> Path:
    return DEMO / "runs" / f"{command}-{way}"


def _environ(**changes: str) -> dict[str, str]:
    """No network, no bars but our own, and one thread: threads that wait for each other make small models slow."""
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return clean_environ(OMP_NUM_THREADS="1", **quiet, **changes)
