"""Runs transformers' own server in a separate process on a free port of this machine, and records what ran in it."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Packages of the extra transformers[serving].
NEEDS = ("fastapi", "uvicorn", "openai", "pydantic")

# A program that runs transformers' command line. With HF_ROCM_FORCE, it also records the hf_rocm operations that ran,
# and the output of explain for the models that are loaded when the server stops.
CHILD = """
import asyncio, gc, json, os, sys
from contextlib import nullcontext
from pathlib import Path

file, *sys.argv[1:] = sys.argv[1:]
import transformers, uvicorn
facts = {"transformers": transformers.__file__, "routes": [], "models": []}
recording = nullcontext([])
if "HF_ROCM_FORCE" in os.environ:
    from hf_rocm import explain, ops
    recording = ops.recording()
shutdown = uvicorn.Server.shutdown

async def shut_down(self, *args, **kwargs):
    for model in [value for value in gc.get_objects() if isinstance(value, transformers.GenerationMixin)]:
        if recording.__class__ is not nullcontext:
            facts["models"].append({**explain(model).to_dict(), "prepared": "_hf_rocm_report" in model.__dict__})
    await shutdown(self, *args, **kwargs)

uvicorn.Server.shutdown = shut_down
try:
    with recording as routes:
        if transformers.__version__.startswith("4."):
            from transformers.commands.transformers_cli import main
        else:
            from transformers.cli.transformers import main
        main()
except (KeyboardInterrupt, SystemExit):
    pass
finally:
    facts["routes"] = [[route.operation, [list(shape) for shape in route.shapes]] for route in routes]
    Path(file).write_text(json.dumps(facts))
    sys.stdout.flush(), sys.stderr.flush()
    # With continuous batching, a thread of transformers would keep the process alive.
    os._exit(0)
"""

# Maximum number of seconds to start, respond or stop on a busy machine.
WAIT = 90


def missing() -> list[str]:
    return [name for name in NEEDS if importlib.util.find_spec(name) is None]


def site(path: Path, *models: str) -> Path:
    """Build a transformers package with the overlays of these models. Other files are links to the installed ones."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent
    package = path / "transformers"
    for model in models:
        shutil.copytree(
            source / "models" / model, package / "models" / model, ignore=shutil.ignore_patterns("__pycache__")
        )
    for folder in (Path(), Path("models")):
        for entry in (source / folder).iterdir():
            if entry.name != "__pycache__" and not (package / folder / entry.name).exists():
                (package / folder / entry.name).symlink_to(entry)
    metadata = next(source.parent.glob("transformers-*.dist-info"))
    shutil.copytree(metadata, path / metadata.name)
    command = ["-m", "hf_rocm", "install-overlays", *models, "--transformers-path", str(package)]
    result = subprocess.run(
        [sys.executable, *command], cwd=path, env=variables(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return path


def variables(path: Path | None = None, **changes: str) -> dict[str, str]:
    """Returns a child's environment variables. path: a folder whose packages are imported first."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_ROCM")}
    paths = [*([str(path)] if path else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    fixed = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    return {**inherited, **fixed, "CUDA_VISIBLE_DEVICES": "", **changes}


class Server:
    """A running server. facts: the records of the process, available once it has ended."""

    def __init__(self, port: int, log: Path) -> None:
        self.port, self.log = port, log
        self.facts: dict[str, Any] = {}

    def post(self, path: str, body: dict[str, Any]) -> str:
        """Send a request. Returns the text of the response; streamed chunks are joined."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read().decode()
        except TimeoutError as error:
            raise AssertionError(f"no response\n{self.log.read_text()}") from error
        finally:
            connection.close()
        assert response.status == 200, f"{response.status} {answer}\n{self.log.read_text()}"
        if response.headers["Content-Type"].startswith("application/json"):
            return text_of(json.loads(answer))
        events = [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line.startswith("data: {")]
        errors = [event for event in events if event.get("error")]
        assert events and not errors, answer
        return "".join(map(text_of, events))


def text_of(event: dict[str, Any]) -> str:
    """Returns the text of a response, or of one streamed chunk of it."""
    if "choices" in event:
        parts = [
            choice.get("text") or choice.get("message", choice.get("delta", {})).get("content") or ""
            for choice in event["choices"]
        ]
        return "".join(parts)
    return event["delta"] if event.get("type") == "response.output_text.delta" else ""


@contextmanager
def serving(folder: Path, *arguments: str, path: Path | None = None, **environment: str) -> Iterator[Server]:
    """Run `transformers serve` with these arguments.

    folder: where to write the log and the facts. path: a folder from `site`, or None for the installed transformers.
    """
    folder.mkdir()
    log, facts = folder / "log", folder / "facts.json"
    command = [sys.executable, "-c", CHILD, str(facts), "serve", *arguments, "--host", "127.0.0.1", "--port", "0"]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=variables(path, **environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        server = Server(wait_until_started(process, log), log)
        yield server
        process.send_signal(signal.SIGINT)
        process.wait(WAIT)
        assert "Application shutdown complete" in log.read_text(), log.read_text()
        server.facts = json.loads(facts.read_text())
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_until_started(process: subprocess.Popen[bytes], log: Path) -> int:
    """Wait for the server to start. Returns its port, read from the log."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline and process.poll() is None:
        match = re.search(r"Uvicorn running on http://127\.0\.0\.1:(\d+)", log.read_text())
        if match:
            return int(match[1])
        time.sleep(0.1)
    raise AssertionError(f"the server did not start\n{log.read_text()}")
