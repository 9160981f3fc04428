"""`transformers serve` as a child process on a free port of this machine, stock or with hf_rocm.

The stock server can't import hf_rocm, so that installed overlays stay inert. The other server prepares its model as
`HF_ROCM_AUTO=1` does, even without installed overlays or ROCm.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from hf_rocm import options
from hf_rocm.errors import HfRocmError, OptionError
from hf_rocm.tools.bench import children
from hf_rocm.tools.bench.measure import Progress
from hf_rocm.tools.bench.serving.client import HOST
from hf_rocm.tools.bench.variants import PREPARED, STOCK

# Packages of the extra transformers[serving].
NEEDS = ("fastapi", "uvicorn", "openai", "pydantic")
_INSTALL = "pip install 'transformers[serving]'"
_CLI = "transformers.cli.transformers"
_PAUSE = 0.1
# Seconds to wait for the server to end after SIGTERM; with continuous batching, it keeps running.
_GRACE = 3.0
_LISTENING = re.compile(rf"Uvicorn running on http://{re.escape(HOST)}:(\d+)")
_SERVE = f"""
sys.argv = ["transformers", "serve", *sys.argv[2:]]
from {_CLI} import main
main()
"""
# side → the code that runs in its child process
CODE = {
    STOCK: "sys.modules['hf_rocm'] = None\n" + _SERVE,
    PREPARED: "from hf_rocm.tools.bench.serving.explained import begin\nbegin(sys.argv[1])\n" + _SERVE,
}


class ServeError(HfRocmError):
    """A server did not start, has ended or does not respond."""


class Server:
    """A running server. port: the port on which it listens."""

    def __init__(self, side: str, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.side, self.process, self.folder = side, process, folder
        self.log = folder / "log"
        self.port = 0

    def check(self, during: str, *, grace: float = 0.0) -> None:
        """Raise `ServeError` if the process has ended, or ends within `grace` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace)
        code = self.process.returncode
        if code is not None:
            ending = f"was killed by {children.signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
            raise ServeError(f"the {self.side} server {ending} {during}", facts={"last lines": self.last_lines()})

    def last_lines(self) -> str:
        return children.tail(self.log)

    def explained(self, *, timeout: float = 30.0) -> list[str]:
        """Return `explain`'s sentences about batches and recorded steps in this server's model.

        The list is empty for stock, on Windows, and if the server ends or does not respond within `timeout` seconds.
        """
        file = self.folder / "explained.json"
        if self.side != PREPARED or not hasattr(signal, "SIGUSR1"):
            return []
        self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.process.poll() is None:
            if file.exists():
                lines: list[str] = json.loads(file.read_text(encoding="utf-8"))
                return lines
            time.sleep(_PAUSE)
        return []


def check() -> None:
    """Raise `OptionError` if transformers can't serve completions, or if packages for serving are missing."""
    import transformers

    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise OptionError(
            "transformers serve needs more packages",
            facts={"missing": ", ".join(missing)},
            hint=_INSTALL,
        )
    if find_spec("transformers.cli") is None or find_spec("transformers.cli.serving") is None:
        raise OptionError(
            f"the server of transformers {transformers.__version__} has no /v1/completions",
            hint="newer releases have it; `hf-rocm bench MODEL` measures generate in every release",
        )
    try:
        import_module(_CLI)
    except ImportError as error:
        raise OptionError(
            "transformers serve can't be imported", facts={"transformers error": error}, hint=_INSTALL
        ) from error


@contextmanager
def serving(
    side: str, arguments: Sequence[str], folder: Path, *, gpu: bool, timeout: float, progress: Progress
) -> Iterator[Server]:
    """Start a server and wait until it listens. At the end of the block, end it and all processes that it started.

    arguments: the arguments of `transformers serve`. folder: a new folder for its log. timeout: the time in seconds for
    loading the model. Raises `ServeError` if the server ends or does not listen in time.
    """
    folder.mkdir(parents=True)
    # These arguments come last, so that they take precedence.
    own = ["--host", HOST, "--port", "0"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            children.command(CODE[side], str(folder / "explained.json"), *arguments, *own),
            env=options.environment() | ({} if gpu else children.NO_GPU),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A new session: the whole group can be ended, and a keyboard interrupt reaches only this process.
            start_new_session=True,
        )
    try:
        server = Server(side, process, folder)
        server.port = _port(server, timeout, progress)
        yield server
    finally:
        _end(process)


def _port(server: Server, timeout: float, progress: Progress) -> int:
    began = time.monotonic()
    while (waited := time.monotonic() - began) < timeout:
        server.check("while it was loading the model")
        match = _LISTENING.search(server.log.read_text(encoding="utf-8", errors="replace"))
        if match:
            return int(match[1])
        progress(f"{server.side}: starting transformers serve, {waited:.0f} s")
        time.sleep(_PAUSE)
    raise ServeError(
        f"the {server.side} server did not start in {timeout:g} s",
        facts={"last lines": server.last_lines()},
        hint="allow more time with --start-timeout",
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process with SIGTERM, then its whole group with SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
