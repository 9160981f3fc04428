"""The device, the versions and the commit, which are reported with every measurement."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from hf_rocm import __version__
from hf_rocm.device import describe, is_rocm

PACKAGES = ("transformers", "triton", "amd-aiter", "liger-kernel")


def machine(device: torch.device) -> dict[str, str]:
    """Return the facts about this machine and its packages that are reported with every measurement."""
    facts = {"device": _name(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        arch = describe(device).arch
        if arch:
            facts["arch"] = arch
    facts["hf_rocm"] = __version__
    facts["torch"] = torch.__version__
    if is_rocm():
        facts["ROCm"] = str(torch.version.hip)
    facts.update({name: version for name in PACKAGES if (version := _version(name))})
    facts["Python"] = platform.python_version()
    return facts


def commit() -> str | None:
    """Return the commit of hf_rocm's checkout, or None without one.

    A `+` follows if tracked files in hf_rocm or overlays are modified.
    """
    root = Path(__file__).resolve().parents[3]
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    if not head or not (root / "overlays").is_dir():
        return None
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "hf_rocm", "overlays")
    return head + ("+" if changed else "")


def note(facts: dict[str, str]) -> str:
    """Return a note on how to interpret numbers from this machine."""
    if "ROCm" in facts:
        return "measured under ROCm"
    return "forced without ROCm: the speed of the portable path here, which does not predict that of an AMD GPU"


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU {platform.processor() or platform.machine()}, {threads} thread{'s' * (threads != 1)}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(root: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
