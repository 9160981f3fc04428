"""scripts/test: set up what the tests need, run the checks and the tests, and add everything up."""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections import Counter
from collections.abc import Sequence

from lib import checks
from lib.console import ScriptError, duration, heading, say, styled, table
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
from lib.upstream_tree import source_distribution

# What depends on the transformers release, so that --all runs it in each of them.
RELEASE_DEPENDENT = (
    "parity",
    "overlay",
    "weights",
    "layers",
    "diagnostics",
    "generation",
    "test_loader.py",
    "test_auto.py",
    "tuning/test_record.py",
)

# Every model that has an overlay, in every release: a suite beside the others, so that two cores share the work.
MODELS = "tests/coverage"

# What releases between the oldest and the newest do without: those have never made the folders here different, and to
# compile every model takes minutes in each.
PROMISES = "tests/overlay/promises"
BETWEEN = (PROMISES, "tests/weights", f"{MODELS}/test_compile.py")
LEFT_OUT = {"4.57.6": (PROMISES,), "5.0.0": BETWEEN, "5.19.0": BETWEEN}

# Several processes: ranks, servers. In the last 4.x and the newest release, a suite of its own as well.
PROCESSES = ("tests/distributed", "tests/serving")
WITH_PROCESSES = ("4.57.6", NEWEST)

# AMD's own package, with stand-ins for its compiled kernels, in an environment of its own.
AITER_TESTS = "tests/aiter"
BESIDE_AITER = f"{NEWEST}, amd-aiter"

# transformers' own mixins, from its source distribution, over tiny models
UPSTREAM_TESTS = "tests/upstream"
UPSTREAM = f"{NEWEST}, its own tests"

# Our Triton kernels in Triton's interpreter, which a process has for all of them or for none: in the environment with
# amd-aiter, since that has a Triton.
TRITON_TESTS = "tests/triton"
INTERPRETED = f"{NEWEST}, Triton interpreted"

# Suites of their own: in which environment which folder is run.
APART = {BESIDE_AITER: AITER_TESTS, INTERPRETED: TRITON_TESTS, UPSTREAM: UPSTREAM_TESTS}

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
        environments[BESIDE_AITER] = environments[INTERPRETED] = release(NEWEST, shared, built, aiter=True)
        if options.all or any(word.startswith(UPSTREAM_TESTS) for word in options.pytest):
            environments[UPSTREAM] = environments[NEWEST]
            fetch_upstream(shared)
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
    """Everything in the newest release, what depends on the release in the others, what stands apart by itself."""
    selection = ["-m", "not slow"] if quick else []
    paths = [word for word in extra if (ROOT / word.split("::")[0]).exists()]
    flags = [word for word in extra if word not in paths]
    # the import rules are a check of their own
    apart = _ignoring((*APART.values(), MODELS, *PROCESSES))
    everything = ["tests", *apart, *([] if extra else ["--ignore", "tests/test_imports.py"])]
    dependent = [f"tests/{name}" for name in RELEASE_DEPENDENT if (ROOT / "tests" / name).exists()]
    dependent += ["--ignore", FAULTS]
    suites = []
    for name, environment in environments.items():
        targets = everything if name == NEWEST else [APART[name]] if name in APART else dependent
        left_out = LEFT_OUT.get(name, ())
        targets = [*(each for each in targets if each not in left_out), *_ignoring(left_out)]
        if paths:
            targets = [path for path in paths if _place(path) == (name if name in APART else None)]
        if targets:
            arguments = (*selection, *flags, *targets)
            suites.append(Suite(f"transformers {name}", environment, arguments, may_be_empty=bool(extra)))
        if name not in APART and not paths:
            arguments = (*selection, *flags, MODELS, *_ignoring(left_out))
            suites.append(Suite(f"transformers {name}, every model", environment, arguments, may_be_empty=bool(extra)))
        if name in WITH_PROCESSES and not paths:
            suites.append(
                Suite(
                    f"transformers {name}, several processes",
                    environment,
                    (*selection, *flags, *PROCESSES),
                    may_be_empty=quick or bool(extra),
                )
            )
    return suites


def fetch_upstream(builder: Environment) -> None:
    """Fetch what the upstream tests need. Where it can't be had they say that they were not run."""
    try:
        source_distribution(NEWEST, builder)
    except ScriptError as error:
        say(f"  {styled('not fetched', 'yellow')}  {str(error).strip().splitlines()[0]}")


def _ignoring(folders: Sequence[str]) -> list[str]:
    return [word for folder in folders for word in ("--ignore", folder)]


def _place(path: str) -> str | None:
    """The suite apart that a path belongs to, or None."""
    return next((name for name, folder in APART.items() if path.startswith(folder)), None)


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
