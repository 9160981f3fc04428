"""The child process that builds and checks kernels, and this process's side of the pipe to it.

One child serves many checks, since importing torch and aiter takes seconds; left alone it ends by itself. It is killed
with everything that it started when it takes too long.
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

IDLE_SECONDS = 60.0  # after this long without a question the child ends
GRACE = 30  # seconds past the time-out after which a hanging child ends by itself
WAKING = 120  # seconds after which a child that hangs before the first question ends by itself
FIRST_WORD, NEXT_WORD = 5.0, 60.0  # seconds until the first word about progress, and between later ones

Request = dict[str, Any]
_logger = logging.getLogger("hf_rocm")
_lock = threading.Lock()
_worker: _Worker | None = None
_listeners: list[Callable[[str], None]] = []


def request(operation: str, tier: str, name: str, kind: tuple[Any, ...]) -> Request:
    return {"operation": operation, "tier": tier, "name": name, "kind": encode(kind)}


def start(device: torch.device | None = None) -> None:
    """Begin to start the child, if there is none; returns at once.

    device: where it will be asked about kernels, if it may have its part of that GPU's memory already.
    """
    global _worker
    with _lock:
        if _worker is None or not _worker.alive():
            if _worker is not None:
                _worker.close()
            _worker = _Worker(warm=True)
        if device is not None:
            _worker.wake(device)


def ask(question: Request, timeout: float) -> str | None:
    """What the child finds wrong, in a sentence, or None. Dying or taking more than `timeout` seconds is wrong too."""
    global _worker
    with _lock:
        for attempt in (1, 2):
            if _worker is None or not _worker.alive():
                if _worker is not None:
                    _worker.close()
                _worker = _Worker()
            try:
                answer = _worker.ask(question, timeout)
            except KeyboardInterrupt:
                _worker.kill()
                _worker = None
                raise
            except _Ended as ended:
                _worker = None
                if not ended.began and attempt == 1:
                    continue  # it had just gone idle
                return ended.reason
            reason: str | None = answer["reason"]
            return reason
    raise AssertionError  # the second attempt returns


def stop() -> None:
    """End the child, if there is one."""
    global _worker
    with _lock:
        if _worker is not None:
            _worker.kill()
            _worker = None


@contextmanager
def progress(listener: Callable[[str], None]) -> Iterator[None]:
    """Send words about long builds to `listener` instead of the log."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def encode(values: tuple[Any, ...]) -> list[Any]:
    return [{type(each).__name__: str(each)} if isinstance(each, _NAMED) else each for each in values]


def decode(values: list[Any]) -> tuple[Any, ...]:
    return tuple(_decode(each) for each in values)


_NAMED = (torch.dtype, torch.device)


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, text),) = value.items()
    return torch.device(text) if kind == "device" else getattr(torch, text.removeprefix("torch."))


class _Ended(Exception):
    """The child is gone. began: it had taken the question."""

    def __init__(self, reason: str, *, began: bool) -> None:
        super().__init__(reason)
        self.reason, self.began = reason, began


# the child sees the modules that this process sees, wherever they come from
_START = "import sys; sys.path[:] = {path!r}; from hf_rocm.ops.probe_worker import serve; serve(warm={warm})"


class _Worker:
    """The child. warm: it makes ready what checks will need; not in place of another one, which may have died of it."""

    def __init__(self, *, warm: bool = False) -> None:
        self.parent = os.getpid()
        self.awake: set[torch.device] = set()
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the child
        start = _START.format(path=sys.path, warm=warm)
        self.process = subprocess.Popen(
            [sys.executable, "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,
            bufsize=0,  # select doesn't see what lies in a buffer
        )

    def alive(self) -> bool:
        return self.parent == os.getpid() and self.process.poll() is None

    def wake(self, device: torch.device) -> None:
        """Have it set itself up on this GPU; once, and without an answer."""
        if device not in self.awake:
            self.awake.add(device)
            with contextlib.suppress(BrokenPipeError):  # whoever asks sees that it is gone
                self._send({"wake": str(device)})

    def _send(self, question: Request) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, question: Request, timeout: float) -> dict[str, Any]:
        began = False
        deadline = time.monotonic() + timeout
        try:
            self._send({**question, "timeout": timeout})
        except BrokenPipeError:
            raise self._ended(began) from None
        while True:
            line = self._line(question, deadline)
            if line is None:
                self.kill()
                raise _Ended(f"it was not built and checked within {timeout:g} s", began=True)
            if not line:
                raise self._ended(began)
            answer: dict[str, Any] = json.loads(line)
            if "reason" in answer:
                return answer
            began = True

    def kill(self) -> None:
        """End it, with the compilers that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.close()

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self.errors.close()

    def _line(self, question: Request, deadline: float) -> bytes | None:
        """The next line, empty if the child ended, None if the time is over."""
        output = self.process.stdout
        assert output is not None
        started, word = time.monotonic(), FIRST_WORD
        while True:
            now = time.monotonic()
            if now >= deadline:
                return None
            ready, _, _ = select.select([output], [], [], max(0.0, min(deadline, started + word) - now))
            if ready:
                return output.readline()
            if time.monotonic() >= started + word:
                what = f"{question['tier']}'s {question['name']}"
                _say(f"building and checking {what}, {word:.0f} s so far (it happens once on this machine)")
                word += NEXT_WORD

    def _ended(self, began: bool) -> _Ended:
        code = self.process.wait()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        self.kill()
        return _Ended(f"the process that checked it {how}" + (f": {lines[-1]}" if lines else ""), began=began)


def _say(text: str) -> None:
    if _listeners:
        _listeners[-1](text)
    else:
        _logger.warning(text)


def serve(*, warm: bool) -> None:
    """The child: one question per line on stdin; for each, a line that it was taken and a line with the reason.

    A line may also say that it is to wake up on a device, which has no answer.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # kernels and compilers print as they like
    import hf_rocm.ops
    from hf_rocm.ops import probe_cases

    assert hf_rocm.ops  # registers every operation
    if warm:
        _in_time(_wake)
    questions = os.fdopen(0, "rb", buffering=0, closefd=False)
    while select.select([questions], [], [], IDLE_SECONDS)[0]:
        line = questions.readline()
        if not line:
            break
        question = json.loads(line)
        if "wake" in question:
            _in_time(_wake_on, question["wake"])
            continue
        answers.write("{}\n")
        answers.flush()
        kind = decode(question["kind"])
        signal.alarm(int(question["timeout"]) + GRACE)  # if nobody is left to kill a child that hangs
        reason = probe_cases.check(question["operation"], question["tier"], question["name"], kind)
        signal.alarm(0)
        answers.write(json.dumps({"reason": reason}) + "\n")
        answers.flush()


def _in_time(step: Callable[..., None], *args: str) -> None:
    signal.alarm(WAKING)
    step(*args)
    signal.alarm(0)


def _wake() -> None:
    """Have done what the first check would wait for: Triton's driver, and its compiler once. Takes no GPU memory."""
    with contextlib.suppress(Exception):  # whoever needs it says what is wrong with it
        if torch.cuda.is_available():
            from triton.runtime import driver

            from hf_rocm.ops.triton.builds import compiled_for
            from hf_rocm.ops.triton.kernels.norm import BUILDS

            compiled_for(BUILDS[0], driver.active.get_current_target())


def _wake_on(device: str) -> None:
    """The GPU's context, which takes some of its memory, and its library of products."""
    with contextlib.suppress(Exception):
        ones = torch.ones(16, 16, dtype=torch.float64, device=device)
        torch.mm(ones, ones).sum().item()
