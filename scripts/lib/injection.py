"""Find or install strace, which the tests use to inject failures of system calls."""

from __future__ import annotations

import os
import shutil
import subprocess

from lib.console import ScriptError, step


def fault_injection() -> None:
    """Install strace if possible. Raises `ScriptError` if strace can't inject faults, which some tests require."""
    if shutil.which("strace") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        with step("strace"):
            for command in (["apt-get", "update"], ["apt-get", "install", "--yes", "strace"]):
                subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    strace = shutil.which("strace")
    if strace is None:
        raise ScriptError(
            "the slow tests inject faults with strace, which is not installed\n\nhint: apt-get install strace"
        )
    probe = [strace, "-f", "-qq", "-o", os.devnull, "-e", "inject=access:error=EIO:when=1+", "true"]
    result = subprocess.run(probe, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ScriptError(
            f"strace can't inject faults here: {result.stderr.strip()}\n\n"
            "hint: ptrace must be allowed; for a container: --cap-add=SYS_PTRACE"
        )
