"""Ranks and servers as child processes of `hf-rocm bench`.

On Linux they end with the command. Their last log lines explain a failure.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

# Variables that hide every GPU from a child.
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}

_ERROR = re.compile(r"(\w+\.)*\w*(Error|Exception)\b.*:")
_PRELUDE = """
import ctypes, os, sys
# A child must not outlive the command that started it, however that command ends.
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != {parent}:
        os._exit(1)
sys.path[:] = {path!r}
"""


def command(code: str, *arguments: str) -> list[str]:
    """Return the command line of a child that runs `code` with this process's `sys.path`.

    On Linux the child ends with this process.
    """
    return [sys.executable, "-c", _PRELUDE.format(parent=os.getpid(), path=sys.path) + code, *arguments]


def signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def tail(log: Path) -> str:
    """Return the last three non-empty lines of a log, joined and cut to the last 400 characters, or `none`.

    If the last line that names an error is not among them, it comes first.
    """
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last = " / ".join(lines[-3:])[-400:] or "none"
    error = next((line for line in reversed(lines) if _ERROR.match(line)), None)
    return last if error is None or error in lines[-3:] else f"{error[:400]} / … / {last}"
