"""One pass over transformers' own tests, in a separate pytest process that is restarted after a crash or a hang."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.console import ScriptError
from lib.environments import clean_environ

PLUGIN = Path(__file__).resolve().with_name("upstream_plugin.py")
FAULTS = PLUGIN.with_name("upstream_faults.py")

# The seconds from a test's time limit until the process is killed, if the plugin's alarm did not end the test.
GRACE = 30.0


@dataclass(frozen=True)
class Result:
    """The result of one test in one pass.

    outcome: `passed`, `failed`, `skipped`, `network` (it needs the Hub), `timeout` or `crashed`.
    hits: the number of calls to overlaid forwards, by class. reached: the number of calls that an injected fault
    changed.
    """

    outcome: str
    seconds: float = 0.0
    reason: str = ""
    hits: Counter[str] = field(default_factory=Counter)
    reached: int = 0


@dataclass(frozen=True)
class Interpreter:
    """A Python that has transformers, hf_rocm and pytest, with additional import folders."""

    python: Path
    path: tuple[Path, ...] = ()

    def environ(self, *first: Path, **changes: str) -> dict[str, str]:
        """The environment variables of a child process, with `first` at the front of its import path."""
        return clean_environ(PYTHONPATH=os.pathsep.join(map(str, (*first, *self.path))), **changes)


@dataclass(frozen=True)
class Pass:
    """How the tests of a tree are run. site: the folder with transformers (None: the one on the interpreter's path).

    fault: one of `upstream_faults.FAULTS`. spread: a factor for the standard deviation of initial weights.
    left_out: tests that are not run.
    """

    interpreter: Interpreter
    tree: Path
    files: tuple[str, ...]
    log: Path
    site: Path | None = None
    timeout: float = 120.0
    pytest: tuple[str, ...] = ()
    fault: str = ""
    spread: float = 1.0
    left_out: tuple[str, ...] = ()


def run(settings: Pass) -> dict[str, Result]:
    """Run every test of the files once. Raises `ScriptError` if pytest can't run them."""
    results: dict[str, Result] = {}
    _link_sources(settings)
    with tempfile.TemporaryDirectory(prefix="upstream-tests-") as scratch:
        while True:
            settings.log.unlink(missing_ok=True)
            code, output = _run_pytest(settings, [*settings.left_out, *results], Path(scratch))
            running = _read(settings.log, results)
            if running is None:
                break
            reason = "the process hung" if code == -signal.SIGKILL else f"the process exited with {code}"
            results[running] = Result("timeout" if code == -signal.SIGKILL else "crashed", reason=reason)
    # 0 and 1: all tests ran; 5: no tests remained after a crash in the last test
    if code not in (0, 1, 5) or not results:
        raise ScriptError(f"pytest did not run transformers' tests (exit code {code})\n\n{output[-3000:]}")
    return results


def overlaid_site(interpreter: Interpreter, folder: Path) -> Path:
    """A copy of the interpreter's transformers, in `folder`, with every overlay of its release installed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    package = _package(interpreter)
    # do not copy temporary files of modules that another process is compiling
    shutil.copytree(package, folder / "transformers", ignore=shutil.ignore_patterns("*.pyc.*"))
    for metadata in package.parent.glob("transformers-*.dist-info"):
        shutil.copytree(metadata, folder / metadata.name)
    install = ["-m", "hf_rocm", "install-overlays", "--transformers-path", str(folder)]
    _output(interpreter, install, "the overlays could not be installed")
    return folder


def _package(interpreter: Interpreter) -> Path:
    find = "import importlib.util; print(importlib.util.find_spec('transformers').origin)"
    return Path(_output(interpreter, ["-c", find], "transformers was not found")).parent


def _link_sources(settings: Pass) -> None:
    """Create src/transformers in the tree as a link to transformers' sources, because some tests read them there."""
    link = settings.tree / "src" / "transformers"
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    site = settings.site
    link.symlink_to(_package(settings.interpreter) if site is None else site / "transformers")


def _run_pytest(settings: Pass, done: list[str], scratch: Path) -> tuple[int, str]:
    (scratch / "plugin").mkdir(exist_ok=True)
    # copy only these files, because the names of the other modules in their folder are too common for the import path
    for file in (PLUGIN, FAULTS):
        shutil.copy2(file, scratch / "plugin")
    command = [
        settings.interpreter.python,
        "-m",
        "pytest",
        "-p",
        PLUGIN.stem,
        "-p",
        FAULTS.stem,
        "-p",
        "no:cacheprovider",
        "-q",
        "--tb=short",
    ]
    command += ["-c", settings.tree / "pytest.ini", "--rootdir", settings.tree, *settings.pytest, *settings.files]
    plugin_settings = {
        "log": str(settings.log),
        "done": done,
        "timeout": settings.timeout,
        "overlaid": settings.site is not None,
    }
    environ = settings.interpreter.environ(
        *([] if settings.site is None else [settings.site]),
        scratch / "plugin",
        UPSTREAM_TESTS=json.dumps(plugin_settings),
        UPSTREAM_FAULT=settings.fault,
        UPSTREAM_SPREAD=str(settings.spread),
        HF_HOME=str(scratch / "hub"),
        HF_HUB_OFFLINE="1",
        # Otherwise a thread requests a converted checkpoint from the Hub.
        DISABLE_SAFETENSORS_CONVERSION="1",
        OMP_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
        PYTHONFAULTHANDLER="1",
        **({} if settings.site is None else {"HF_ROCM_FORCE": "1", "HF_ROCM_CACHE": str(scratch / "probes")}),
    )
    output = scratch / "output"
    with output.open("w") as stream:
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=settings.tree,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            # Start a session, so that processes that a test leaves running are killed too.
            start_new_session=True,
        )
        try:
            code = _watch(process, settings)
        finally:
            _end(process)
    return code, output.read_text(errors="replace")


def _watch(process: subprocess.Popen[bytes], settings: Pass) -> int:
    """Wait for the process to end. Kill it if it writes nothing to the log for longer than a test may take."""
    last_output, seen = time.monotonic(), 0.0
    while process.poll() is None:
        time.sleep(0.2)
        written = settings.log.stat().st_mtime if settings.log.exists() else 0.0
        if written != seen:
            last_output, seen = time.monotonic(), written
        elif time.monotonic() - last_output > settings.timeout + GRACE:
            _end(process)
            return -signal.SIGKILL
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _read(log: Path, results: dict[str, Result]) -> str | None:
    """Add the results in the log. Returns the test that has begun but not ended, or None."""
    running = None
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        entry: dict[str, Any] = json.loads(line)
        running = entry.get("began")
        if running is None:
            hits = Counter(entry["hits"])
            results[entry["ended"]] = Result(
                entry["outcome"], entry["seconds"], entry["reason"], hits, entry["reached"]
            )
    return running


def _output(interpreter: Interpreter, arguments: Sequence[str], failure: str) -> str:
    command = [str(interpreter.python), *arguments]
    # In a checkout, Python would import the checkout's modules first.
    directory = tempfile.gettempdir()
    environ = interpreter.environ()
    result = subprocess.run(command, env=environ, cwd=directory, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ScriptError(f"{failure}\n  command  {' '.join(command)}\n\n{(result.stdout + result.stderr)[-3000:]}")
    return result.stdout.strip()
