"""The wheel of this checkout, installed in a folder, and a function that runs Python in a new process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns a function that runs this Python. By default, only installed packages (and `path`) can be imported."""
    empty = tmp_path_factory.mktemp("empty")

    def python(*words: str | Path, path: Path | None = None, cwd: Path = empty) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)

    return python


@pytest.fixture(scope="session")
def build(run: Run) -> Callable[[str, Path, Path], Path]:
    """Returns a function that builds an artefact (`wheel` or `sdist`) of a source tree into a folder, offline."""
    pytest.importorskip("hatchling")

    def make(target: str, source: Path, out: Path) -> Path:
        result = run("-m", "hatchling", "build", "--target", target, "--directory", out, cwd=source)
        assert result.returncode == 0, result.stdout + result.stderr
        (built,) = out.iterdir()
        return built

    return make


@pytest.fixture(scope="session")
def wheel(build: Callable[[str, Path, Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that contains only the installed wheel."""
    target = tmp_path_factory.mktemp("installed")
    result = run("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target, wheel)
    assert result.returncode == 0, result.stdout + result.stderr
    return target
