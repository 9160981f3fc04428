"""Processes that `hf-rocm bench` starts: they end with the command, and their last words explain a failure."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

# Variables that hide every GPU from a child.
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}

_PRELUDE = """
import ctypes, os, sys
if sys.platform == "linux":  # a child must not outlive the command that started it, however that ends
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != {parent}:
        os._exit(1)
sys.path[:] = {path!r}
"""


def command(code: str, *arguments: str) -> list[str]:
    """The command line of a child that runs `code` with this process's `sys.path`, and ends when this process ends."""
    return [sys.executable, "-c", _PRELUDE.format(parent=os.getpid(), path=sys.path) + code, *arguments]


def signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def tail(log: Path) -> str:
    """The last non-empty lines of a log, on one line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-3:])[-400:] or "none"
