"""Stub servers that start immediately, unlike transformers' server."""

from __future__ import annotations

import os
import time

import pytest

from hf_rocm.tools.bench.serving import server


@pytest.fixture
def stubs(monkeypatch):
    """Returns a function that replaces the servers of both sides with stubs.

    The function takes the arguments of `stub.main` for each side.
    """

    def replace(stock=None, hf_rocm=None):
        for side, arguments in (("stock", stock), ("hf_rocm", hf_rocm)):
            call = ", ".join(f"{name}={value!r}" for name, value in (arguments or {}).items())
            monkeypatch.setitem(server.CODE, side, f"from tests.tools.bench.serving.stub import main\nmain({call})\n")

    replace()
    return replace


def ended(pid, within=5.0):
    """Whether a process ends or becomes a zombie within this number of seconds."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False
