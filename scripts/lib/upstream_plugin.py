"""The pytest plugin for transformers' own tests: it records their outcomes and their calls to hf_rocm's forwards.

It is loaded with `-p upstream_plugin`. The variable UPSTREAM_TESTS contains its settings as JSON: `log`, the file
to which a JSON line is written when a test starts and when it ends, so that a test that crashes the process can be
identified; `done`, tests to skip; `timeout`, seconds per test; `overlaid`, whether overlays may be active.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import socket
import sys
import time
import zlib
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

SETTINGS: dict[str, Any] = json.loads(os.environ["UPSTREAM_TESTS"])

PASSED, FAILED, SKIPPED, NETWORK, TIMEOUT = "passed", "failed", "skipped", "network", "timeout"

# Names of the errors that show that a test needs the Hub. The libraries that define them differ between releases.
NEEDS_NETWORK = {"NetworkForbidden", "OfflineModeIsEnabled", "LocalEntryNotFoundError", "ProxyError"}

_BY_SEVERITY = (PASSED, SKIPPED, NETWORK, FAILED, TIMEOUT)


class NetworkForbidden(OSError):
    """A test tried to connect to another machine."""


class TooSlow(BaseException):
    """A test exceeded its time limit. Not an Exception, so that the test can't catch it by accident."""


class _Progress:
    """The state of the test that is running."""

    def __init__(self) -> None:
        self.outcome, self.reason = PASSED, ""
        self.began = time.monotonic()
        self.hits: Counter[str] = Counter()
        self.changed = _changed_calls()

    def worsen(self, outcome: str, reason: str) -> None:
        if _BY_SEVERITY.index(outcome) > _BY_SEVERITY.index(self.outcome):
            self.outcome, self.reason = outcome, reason


def _changed_calls() -> int:
    """The number of calls that an injected fault has changed so far (see `upstream_faults`)."""
    return getattr(sys.modules.get("upstream_faults"), "reached", 0)


_current = _Progress()
_counted: set[int] = set()


def pytest_configure(config: pytest.Config) -> None:
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise NetworkForbidden(f"{address[0]}: tests run without a network")
        connect(self, address)

    socket.socket.connect = local_only  # type: ignore[method-assign, assignment]
    signal.signal(signal.SIGALRM, _too_slow)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = set(SETTINGS["done"])
    left_out = [item for item in items if item.nodeid in done]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item.nodeid not in done]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run one test with a time limit, and with a line in the log at its start and end.

    The random numbers are the same in the pass with stock transformers and in the pass with overlays.
    """
    global _current
    _current = _Progress()
    _write({"began": item.nodeid})
    _seed(item.nodeid)
    _count_hits()
    signal.setitimer(signal.ITIMER_REAL, SETTINGS["timeout"])
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        seconds = round(time.monotonic() - _current.began, 3)
        ended = {"outcome": _current.outcome, "seconds": seconds, "reason": _current.reason}
        ended["reached"] = _changed_calls() - _current.changed
        _write({"ended": item.nodeid, **ended, "hits": dict(_current.hits)})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _current.worsen(SKIPPED, reason.removeprefix("Skipped: "))
    elif report.failed:
        error = call.excinfo.value if call.excinfo is not None else None
        _current.worsen(_kind(error), _summary(error))
    return report


def _kind(error: BaseException | None) -> str:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, TooSlow):
            return TIMEOUT
        if type(error).__name__ in NEEDS_NETWORK:
            return NETWORK
        error = error.__cause__ or error.__context__
    return FAILED


def _summary(error: BaseException | None) -> str:
    text = " ".join(str(error).split()) if error is not None else ""
    return f"{type(error).__name__}: {text}"[:300]


def _too_slow(signum: int, frame: object) -> None:
    raise TooSlow(f"took longer than {SETTINGS['timeout']} s")


def _seed(test: str) -> None:
    """Seed every random generator that the tests use. transformers' common test module has its own generator."""
    number = zlib.crc32(test.encode())
    random.seed(number)
    for name, module in list(sys.modules.items()):
        if name.endswith("test_modeling_common") and isinstance(getattr(module, "global_rng", None), random.Random):
            module.global_rng.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)


def _count_hits() -> None:
    """Count calls to the overlays' forwards by class name. In the stock pass, make sure that there are no overlays."""
    bind = sys.modules.get("hf_rocm.overlay.bind")
    for binding in bind.bindings() if bind is not None else ():
        if not SETTINGS["overlaid"]:
            pytest.exit(f"{binding.cls.__name__} is overlaid in the stock pass", returncode=3)
        if id(binding) not in _counted:
            _counted.add(id(binding))
            binding.replacement = _counting(binding.replacement, binding.cls.__name__)


def _counting(replacement: Any, name: str) -> Any:
    import torch

    @functools.wraps(replacement)
    def counted(*args: Any, **kwargs: Any) -> Any:
        # Do not count traced calls, and do not change the trace.
        if not torch.compiler.is_compiling():
            _current.hits[name] += 1
        return replacement(*args, **kwargs)

    return counted


def _write(entry: dict[str, Any]) -> None:
    with Path(SETTINGS["log"]).open("a", encoding="utf-8") as log:
        log.write(json.dumps(entry) + "\n")
