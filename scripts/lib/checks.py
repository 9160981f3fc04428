"""scripts/check: format, lint, types and the import rules, in the base environment."""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from lib.console import heading, line, say
from lib.environments import ROOT, Environment, base, clean_environ, lock
from lib.suites import Outcome

FOLDERS = ("hf_rocm", "overlays", "scripts", "tests")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/check", description="ruff format, ruff, mypy strict, import rules.")
    parser.add_argument("--fix", action="store_true", help="let ruff format and repair the sources first")
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
    """Run every gate, also when one has failed."""
    ruff, python = environment.path / "bin" / "ruff", environment.python
    import_rules = ["-q", "--no-header", "-p", "no:cacheprovider", "tests/test_imports.py"]
    return [
        _gate("format", [ruff, "format", "--check", *sources()]),
        _gate("lint", [ruff, "check", *sources()]),
        _gate("types", [python, "-m", "mypy", "hf_rocm", "scripts/lib", "scripts/train_tiny.py"]),
        _gate("import rules", [python, "-m", "pytest", *import_rules]),
    ]


def sources() -> list[str]:
    """The folders, and the scripts that have no .py to be found by."""
    folders = [name for name in FOLDERS if (ROOT / name).is_dir()]
    scripts = sorted(path for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix)
    return [*folders, *(str(path.relative_to(ROOT)) for path in scripts if _is_python(path))]


def _gate(name: str, command: Sequence[str | Path]) -> Outcome:
    began = time.monotonic()
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=clean_environ(MYPYPATH=str(ROOT / "scripts")),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    outcome = Outcome(name, seconds=time.monotonic() - began)
    if done.returncode:
        outcome.failed = 1
        line(name, "failed", "red", outcome.seconds)
        say("\n".join(f"    {text}" for text in done.stdout.strip().splitlines()))
    else:
        outcome.passed = 1
        line(name, "passed", "green", outcome.seconds)
    return outcome


def _is_python(path: Path) -> bool:
    with path.open("rb") as file:
        return b"python" in file.readline()
