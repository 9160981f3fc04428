"""The parent's side of the pipe to the child process that builds and checks kernels (see `probe_child`).

One child runs many checks, because importing torch and aiter takes seconds. It exits when it is idle. If a check takes
too long, the child is killed with all processes that it started.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch

# Seconds before the first message about progress, and between later ones.
FIRST_MESSAGE, NEXT_MESSAGE = 5.0, 60.0

Request = dict[str, Any]
_logger = logging.getLogger("hf_rocm")
_lock = threading.Lock()
_worker: _Worker | None = None
_listeners: list[Callable[[str], None]] = []


def request(operation: str, tier: str, name: str, kind: tuple[Any, ...]) -> Request:
    return {"operation": operation, "tier": tier, "name": name, "kind": encode(kind)}


def start(device: torch.device | None = None) -> None:
    """Start the child if there is none, without waiting for it.

    device: a GPU that the child initialises in advance, which takes some GPU memory; None to initialise no GPU yet.
    """
    global _worker
    with _lock:
        if _worker is None or not _worker.alive():
            if _worker is not None:
                _worker.close()
            _worker = _Worker(warm=True)
        if device is not None:
            _worker.wake(device)


def send(request: Request, timeout: float) -> str | None:
    """Run a check in the child. Returns the problem, as a sentence, or None.

    A crash or a time-out also counts as a failed check. timeout: in seconds.
    """
    global _worker
    with _lock:
        for attempt in (1, 2):
            if _worker is None or not _worker.alive():
                if _worker is not None:
                    _worker.close()
                try:
                    _worker = _Worker()
                except OSError as error:
                    # There may be too many processes or open files.
                    _worker = None
                    return f"no process could be started to check it: {error.strerror or error}"
            try:
                reply = _worker.send(request, timeout)
            except KeyboardInterrupt:
                _worker.kill()
                _worker = None
                raise
            except _Ended as ended:
                _worker = None
                # the child exited before it read the request, most likely because it was idle
                if not ended.began and attempt == 1:
                    continue
                return ended.reason
            reason: str | None = reply["reason"]
            return reason
    # The second attempt always returns.
    raise AssertionError


def stop() -> None:
    """Kill the child, if there is one."""
    global _worker
    with _lock:
        if _worker is not None:
            _worker.kill()
            _worker = None


@contextmanager
def progress(listener: Callable[[str], None]) -> Iterator[None]:
    """Within the block, pass messages about long builds to `listener` instead of the log."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def encode(values: tuple[Any, ...]) -> list[Any]:
    return [{type(value).__name__: str(value)} if isinstance(value, _NAMED) else value for value in values]


def decode(values: list[Any]) -> tuple[Any, ...]:
    return tuple(_decode(value) for value in values)


_NAMED = (torch.dtype, torch.device)


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, text),) = value.items()
    return torch.device(text) if kind == "device" else getattr(torch, text.removeprefix("torch."))


class _Ended(Exception):
    """The child has exited. began: whether it had read the request."""

    def __init__(self, reason: str, *, began: bool) -> None:
        super().__init__(reason)
        self.reason, self.began = reason, began


# the child gets this process's sys.path, so that it imports the same versions of all modules
_START = "import sys; sys.path[:] = {path!r}; from hf_rocm.ops.probe_child import serve; serve(warm={warm})"


class _Worker:
    """The child process. warm: whether it initialises Triton's driver and compiler before the first check."""

    def __init__(self, *, warm: bool = False) -> None:
        self.parent = os.getpid()
        self.awake: set[torch.device] = set()
        start = _START.format(path=sys.path, warm=warm)
        self.errors = _errors()
        try:
            self.process = subprocess.Popen(
                [sys.executable or "python3", "-c", start],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if self.errors is None else self.errors,
                start_new_session=True,
                # `poll` does not report data in Python's buffer.
                bufsize=0,
            )
        except BaseException:
            if self.errors is not None:
                self.errors.close()
            raise

    def alive(self) -> bool:
        return self.parent == os.getpid() and self.process.poll() is None

    def wake(self, device: torch.device) -> None:
        """Request that the child initialise this GPU, at most once, without waiting for it."""
        if device not in self.awake:
            self.awake.add(device)
            # The next check detects that the child has exited.
            with contextlib.suppress(BrokenPipeError):
                self._send({"wake": str(device)})

    def _send(self, request: Request) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def send(self, request: Request, timeout: float) -> dict[str, Any]:
        began = False
        deadline = time.monotonic() + timeout
        try:
            self._send({**request, "timeout": timeout})
        except BrokenPipeError:
            raise self._ended(began) from None
        while True:
            line = self._line(request, deadline)
            if line is None:
                self.kill()
                raise _Ended(f"it was not built and checked within {timeout:g} s", began=True)
            if not line.endswith(b"\n"):
                raise self._ended(began)
            reply: dict[str, Any] = json.loads(line)
            if "reason" in reply:
                return reply
            began = True

    def kill(self) -> None:
        """Kill the child and the compilers that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.close()

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self.errors is not None:
            self.errors.close()

    def _line(self, request: Request, deadline: float) -> bytes | None:
        """The next line; empty if the child has exited, None after the deadline."""
        output = self.process.stdout
        assert output is not None
        started, message = time.monotonic(), FIRST_MESSAGE
        # select.select fails on file descriptors above 1023.
        waiting = select.poll()
        waiting.register(output, select.POLLIN)
        while True:
            now = time.monotonic()
            if now >= deadline:
                return None
            if waiting.poll(1000 * max(0.0, min(deadline, started + message) - now)):
                return output.readline()
            if time.monotonic() >= started + message:
                label = f"{request['tier']}'s {request['name']}"
                _report(f"building and checking {label}, {message:.0f} s so far (once on this machine)")
                message += NEXT_MESSAGE

    def _ended(self, began: bool) -> _Ended:
        code = self.process.wait()
        outcome = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        lines: list[str] = []
        if self.errors is not None:
            self.errors.seek(0)
            lines = self.errors.read().decode(errors="replace").strip().splitlines()
        self.kill()
        return _Ended(f"the process that checked it {outcome}" + (f": {lines[-1]}" if lines else ""), began=began)


def _errors() -> IO[bytes] | None:
    """A file for the child's stderr: in memory on Linux, else in the temporary folder; None on failure."""
    try:
        if hasattr(os, "memfd_create"):
            return os.fdopen(os.memfd_create("hf_rocm-probe"), "w+b")
        return tempfile.TemporaryFile()
    except OSError:
        return None


def _report(text: str) -> None:
    if _listeners:
        _listeners[-1](text)
    else:
        _logger.warning(text)
