"""scripts/check: formatting, linting, types and the rules for imports and comments, in the base environment."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lib.console import echo, heading, line
from lib.environments import ROOT, Environment, base, clean_environ, lock
from lib.suites import Outcome

MYPY_CACHE = ROOT / ".mypy_cache"
FOLDERS = ("hf_rocm", "overlays", "scripts", "tests")

# Tests that read only the sources. They run here, not with every release of transformers.
RULES = ("tests/test_imports.py", "tests/test_comments.py")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/check", description="Check formatting, linting, types, and the rules for imports and comments."
    )
    parser.add_argument("--fix", action="store_true", help="let ruff fix and format the sources first")
    fix = parser.parse_args(arguments).fix
    with lock():
        environment = base()
    if fix:
        for command in (["check", "--fix-only", "--quiet"], ["format", "--quiet"]):
            subprocess.run([environment.path / "bin" / "ruff", *command, *sources()], cwd=ROOT, check=False)
    heading("checks")
    failed = sum(outcome.failed for outcome in run(environment))
    return 1 if failed else 0


def run(environment: Environment) -> list[Outcome]:
    """Run all gates in parallel; a failure does not stop the others."""
    ruff, python = environment.path / "bin" / "ruff", environment.python
    rules = ["-q", "--no-header", "-p", "no:cacheprovider", *RULES]
    gates: list[tuple[str, list[str | Path]]] = [
        ("types", [python, "-m", "mypy", *typed_sources()]),
        ("rules for imports and comments", [python, "-m", "pytest", *rules]),
        ("format", [ruff, "format", "--check", *sources()]),
        ("lint", [ruff, "check", *sources()]),
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda gate: _gate(*gate), gates))


def typed_sources() -> list[str | Path]:
    """mypy's arguments for the package, the scripts and the overlays."""
    return ["--scripts-are-modules", "--explicit-package-bases", "hf_rocm", "scripts/lib", *scripts(), *overlays()]


def overlays() -> list[Path]:
    """Link every overlay directory under a valid package name, because mypy needs unique module names."""
    links = MYPY_CACHE / "overlays"
    shutil.rmtree(links, ignore_errors=True)
    links.mkdir(parents=True)
    directories = sorted((ROOT / "overlays").glob("transformers-*"))
    for directory in directories:
        name = re.sub(r"\W", "_", directory.name)
        (links / name).symlink_to(directory, target_is_directory=True)
    return sorted(links.iterdir())


def sources() -> list[str]:
    """The source folders, and the scripts whose names do not end in .py."""
    folders = [name for name in FOLDERS if (ROOT / name).is_dir()]
    return [*folders, *(name for name in scripts() if not name.endswith(".py"))]


def scripts() -> list[str]:
    """Every Python script, whether or not its name ends in .py."""
    files = sorted(path for path in (ROOT / "scripts").iterdir() if path.is_file())
    return [str(path.relative_to(ROOT)) for path in files if path.suffix == ".py" or _is_python(path)]


def _gate(name: str, command: Sequence[str | Path]) -> Outcome:
    began = time.monotonic()
    result = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=clean_environ(MYPYPATH=os.pathsep.join(map(str, (ROOT, ROOT / "scripts", MYPY_CACHE)))),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    outcome = Outcome(name, seconds=time.monotonic() - began)
    if result.returncode:
        outcome.failed = 1
        line(name, "failed", "red", outcome.seconds)
        echo("\n".join(f"    {text}" for text in result.stdout.strip().splitlines()))
    else:
        outcome.passed = 1
        line(name, "passed", "green", outcome.seconds)
    return outcome


def _is_python(path: Path) -> bool:
    with path.open("rb") as file:
        return not path.suffix and b"python" in file.readline()
