"""scripts/test: set up what the tests need, run the checks and the tests, and add everything up."""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections import Counter
from collections.abc import Sequence

from lib import checks
from lib.console import duration, heading, say, styled, table
from lib.environments import (
    ENVIRONMENTS,
    NEEDS_PYTHON,
    NEWEST,
    RELEASES,
    ROOT,
    RUNNABLE,
    Environment,
    base,
    lock,
    release,
    wheel,
)
from lib.injection import fault_injection
from lib.suites import Outcome, Suite, run_all

# What depends on the transformers release, so that --all runs it in each of them.
RELEASE_DEPENDENT = ("parity", "overlay", "weights", "layers", "diagnostics", "test_loader.py")

# AMD's own package, with stand-ins for its compiled kernels, in an environment of its own.
AITER_TESTS = "tests/aiter"
BESIDE_AITER = f"{NEWEST}, amd-aiter"

# Suites that need hardware; conftest.py skips them with these words where it is missing.
HARDWARE = {"needs an AMD GPU": "pytest -m rocm", "needs an NVIDIA or AMD GPU": "pytest -m gpu"}

# minutes of injected faults, which no release makes different: they run in the newest alone
FAULTS = "tests/overlay/promises/test_faults.py"

DESCRIPTION = f"""\
Set up what the tests need in .envs/ and run them; nothing has to be installed before.

Without options: scripts/check and the quick tests with transformers {NEWEST}.
With --all: the slow tests too, and those that depend on transformers with {", ".join(RUNNABLE[:-1])} as well."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/test", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="every test, in every supported release that is tested")
    parser.add_argument("pytest", nargs="*", help="after --, arguments for pytest (then the checks are left out)")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    say(f"{styled('hf_rocm tests', 'bold')}  Python {platform.python_version()}, {machine}")
    with lock():
        heading("set-up")
        shared = base()
        built = wheel(shared, ENVIRONMENTS / "wheel")
        environments = {NEWEST: release(NEWEST, shared, built)}
        environments[BESIDE_AITER] = release(NEWEST, shared, built, aiter=True)
        for version in RUNNABLE[-2::-1] if options.all else ():
            environments[version] = release(version, shared, built)
        if options.all:
            fault_injection()
        outcomes = []
        if not options.pytest:
            heading("checks")
            outcomes += checks.run(shared)
        heading("tests")
        outcomes += run_all(plan(environments, options.pytest, quick=not options.all))
    return summarise(outcomes, began, everything=options.all)


def plan(environments: dict[str, Environment], extra: Sequence[str], *, quick: bool) -> list[Suite]:
    """Everything in the newest release, what depends on the release in the others, aiter's tests beside aiter."""
    selection = ["-m", "not slow"] if quick else []
    paths = [word for word in extra if (ROOT / word.split("::")[0]).exists()]
    flags = [word for word in extra if word not in paths]
    # the import rules are a check of their own
    everything = ["tests", "--ignore", AITER_TESTS, *([] if extra else ["--ignore", "tests/test_imports.py"])]
    dependent = [f"tests/{name}" for name in RELEASE_DEPENDENT if (ROOT / "tests" / name).exists()]
    dependent += ["--ignore", FAULTS]
    suites = []
    for name, environment in environments.items():
        targets = everything if name == NEWEST else [AITER_TESTS] if name == BESIDE_AITER else dependent
        if paths:
            targets = [path for path in paths if path.startswith(AITER_TESTS) == (name == BESIDE_AITER)]
        if targets:
            arguments = (*selection, *flags, *targets)
            suites.append(Suite(f"transformers {name}", environment, arguments, may_be_empty=bool(extra)))
    return suites


def summarise(outcomes: Sequence[Outcome], began: float, *, everything: bool) -> int:
    """The table, what did not run, and the total as the last line."""
    heading("summary")
    rows = [
        (each.name, str(each.passed), str(each.failed), str(each.skipped), duration(each.seconds)) for each in outcomes
    ]
    table(("", "passed", "failed", "skipped", "time"), rows)
    not_run: Counter[str] = sum((each.not_run for each in outcomes), Counter())
    say()
    for reason, command in HARDWARE.items():
        if not_run[reason] or not any(each.not_run for each in outcomes):
            say(f"  {styled('not run', 'yellow')}  {command}: {reason} ({not_run[reason]} tests)")
    for reason in sorted(set(not_run) - set(HARDWARE)):
        say(f"  {styled('not run', 'yellow')}  {reason} ({not_run[reason]} tests)")
    for version in set(RELEASES) - set(RUNNABLE):
        needed = ".".join(map(str, NEEDS_PYTHON[version]))
        say(f"  {styled('not run', 'yellow')}  transformers {version}: needs Python {needed}")
    if not everything:
        say(f"  {styled('not run', 'yellow')}  slow tests and the other releases: scripts/test --all")
    passed, failed = sum(each.passed for each in outcomes), sum(each.failed for each in outcomes)
    skipped = sum(each.skipped for each in outcomes)
    say(f"\n  {duration(time.monotonic() - began)} in all\n")
    say(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0
