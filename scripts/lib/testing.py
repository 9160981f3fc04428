"""scripts/test: set up the environments, run the checks and the tests, and summarise the results."""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections import Counter
from collections.abc import Sequence

from lib import checks, machine_code
from lib.console import ScriptError, duration, echo, heading, styled, table
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

# Tests that depend on the transformers release: --all runs them with every tested release, except those in `LEFT_OUT`.
RELEASE_DEPENDENT = (
    "parity",
    "overlay",
    "weights",
    "layers",
    "tools/test_explain.py",
    "tools/verify",
    "generation",
    "forwards",
    "loading",
    "tools/tuning/test_record.py",
)

# Tests of every model that has an overlay, in every release. They form a separate suite, so that two cores share the
# work.
MODELS = "tests/coverage"

# Tests of the patcher that use the files of a release only as bytes, or use no release.
PROMISES = "tests/overlay/promises"
BYTES = (
    PROMISES,
    *(
        f"tests/overlay/test_{name}.py"
        for name in ("block", "drafts", "install", "locate", "lock", "newer_release", "scripts")
    ),
)

# Tests of hf_rocm's own code, which do not depend on the release.
OWN = (
    "tests/tools/verify/test_faults.py",
    "tests/forwards/test_at_random.py",
    *(
        f"tests/generation/test_{name}.py"
        for name in (
            "assistants",
            "draft_search",
            "drafting",
            "early_drafts",
            "lookahead",
            "loop_rows",
            "queued_steps",
            "replaced_at_random",
            "sentinel",
            "soak",
            "token_choice_replaced",
            "verification",
        )
    ),
)

# Tests that are left out with 4.57, 5.0 and 5.19, some of them also with 4.53. docs/testing.md gives the reasons, also
# for the other tests that are left out with some releases.
NOT_IN_BETWEEN = (
    *BYTES,
    *OWN,
    *(f"tests/generation/test_{name}.py" for name in ("ledger", "replaced", "speculation", "streams")),
    "tests/generation/test_trained.py",
    "tests/tools/verify/test_stock.py",
    "tests/weights/test_large.py",
    "tests/weights/test_parallel.py",
)
NOT_WITH_5_0_AND_5_19 = (
    *NOT_IN_BETWEEN,
    *(f"tests/generation/test_{name}.py" for name in ("beams", "masks", "token_choice", "user_caches")),
    "tests/forwards",
    "tests/layers",
    "tests/tools/verify",
    "tests/weights",
)
LEFT_OUT = {
    "4.53.3": (
        *OWN,
        *(f"{PROMISES}/test_{name}.py" for name in ("any_order", "at_once", "packages")),
        *(f"tests/overlay/test_{name}.py" for name in ("drafts", "lock", "scripts")),
        "tests/tools/verify/test_stock.py",
        "tests/weights/test_large.py",
        "tests/weights/test_parallel.py",
    ),
    "4.57.6": (
        *NOT_IN_BETWEEN,
        *(f"tests/generation/test_{name}.py" for name in ("beams", "token_choice", "user_caches")),
        "tests/tools/verify",
    ),
    "5.0.0": NOT_WITH_5_0_AND_5_19,
    "5.19.0": NOT_WITH_5_0_AND_5_19,
}

# Tests with several processes, such as ranks or servers. They run with the last 4.x and the newest release, also in a
# separate suite.
PROCESSES = ("tests/distributed", "tests/serving")
WITH_PROCESSES = ("4.57.6", NEWEST)

# Tests of `PROCESSES` that run only with the newest release. Most of them test hf_rocm's own code, such as startup,
# agreement and shutdown of ranks, servers, and benchmarks.
OWN_PROCESSES = tuple(
    f"tests/{name}.py"
    for name in (
        "serving/test_bench_serve",
        "serving/test_faulty_requests",
        "serving/test_requests_at_random",
        "serving/test_server",
        "serving/test_server_calls",
        "serving/test_sliding_pages",
        "distributed/test_accelerate_launch",
        "distributed/test_bench_tp",
        "distributed/test_failures",
        "distributed/test_launch",
        "distributed/test_rank_logging",
        "distributed/test_ranks",
        "distributed/test_ranks_agree",
        "distributed/test_ranks_environment",
        "distributed/test_ranks_facts",
        "distributed/test_ranks_heads",
        "distributed/test_ranks_probe",
        "distributed/test_ranks_workers",
    )
)

# Parts of the newest release's tests that form separate suites of similar length.
PARTS = {
    "the patcher": ("tests/overlay",),
    "tools": ("tests/tools", "tests/cli", "tests/scripts", "tests/docs", "tests/packaging"),
}

# Tests with AMD's package and stand-ins for its compiled kernels, in a separate environment.
AITER_TESTS = "tests/aiter"
WITH_AITER = f"{NEWEST}, amd-aiter"

# Tests from transformers' own mixins, which are in its source distribution, with tiny models.
UPSTREAM_TESTS = "tests/upstream"
UPSTREAM = f"{NEWEST}, its own tests"

# Tests of Triton kernels in Triton's interpreter, which a process uses for all kernels or for none. They run in the
# environment with amd-aiter, which has Triton.
TRITON_TESTS = "tests/triton"
INTERPRETED = f"{NEWEST}, Triton interpreted"
# A part of the interpreted cases, because the machine-code suites run other cases of the same tests.
PART = ("--machine-code-share", "part")

# Tests of the interpreter of AMD's instructions, with the same Triton. `machine_code` runs the kernels on this
# interpreter.
INSTRUCTION_TESTS = "tests/amdgcn"
INSTRUCTIONS = f"{NEWEST}, AMD's instructions"

# Separate suites: name of the suite → folder.
SEPARATE = {
    WITH_AITER: AITER_TESTS,
    INTERPRETED: TRITON_TESTS,
    INSTRUCTIONS: INSTRUCTION_TESTS,
    UPSTREAM: UPSTREAM_TESTS,
}

# The longest suites, longest first, identified by the end of their names. All others follow.
LONGEST = (
    f" {NEWEST}",
    f"{NEWEST}, every model",
    " 4.53.3",
    f"{NEWEST}, several processes",
    f"{NEWEST}, the patcher",
    INTERPRETED,
    f"{NEWEST}, tools",
    UPSTREAM,
    "4.57.6, several processes",
    " 4.57.6",
    "4.53.3, every model",
    "4.57.6, every model",
    "5.0.0, every model",
    " 5.0.0",
    " 5.19.0",
    "5.19.0, every model",
    WITH_AITER,
)

# The reason that conftest.py gives for skipping tests without the hardware → the command that runs these tests.
HARDWARE = {"needs an AMD GPU": "pytest -m rocm", "needs an NVIDIA or AMD GPU": "pytest -m gpu"}

# Tests with injected faults take minutes and don't depend on the release, so they run only with the newest one.
FAULTS = "tests/overlay/promises/test_faults.py"

DESCRIPTION = f"""\
Set up the tests' environments in .envs/ and run the tests. Nothing needs to be installed first.

Without options: scripts/check and the quick tests with transformers {NEWEST}.
With --all: also the slow tests, and the release-dependent tests with transformers {", ".join(RUNNABLE[:-1])}.
Both also execute the machine code that Triton generates for AMD GPUs: a sample of the cases, and with --all a larger
sample for gfx942 and a few cases for two related architectures.
With --machine-code: all of these cases, and no other tests.
With --release X -- tests/coverage -k mistral: only these tests, with transformers X."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/test", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="also the slow tests, and the release-dependent tests in every tested release",
    )
    parser.add_argument(
        "--release",
        choices=RUNNABLE,
        help=f"the tests that depend on transformers, with this release; for {NEWEST}, also most of the other tests",
    )
    parser.add_argument(
        "--machine-code",
        nargs="*",
        metavar="ARCH",
        choices=(*machine_code.ARCHITECTURES, *machine_code.RELATIVES),
        help="all cases of the kernels' machine code, for the given architectures (default: all)",
    )
    parser.add_argument("pytest", nargs="*", help="after --, arguments for pytest (then the checks are skipped)")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    echo(f"{styled('hf_rocm tests', 'bold')}  Python {platform.python_version()}, {machine}")
    with lock():
        heading("set-up")
        shared = base()
        built = wheel(shared, ENVIRONMENTS / "wheel")
        if options.machine_code is not None:
            environment = release(NEWEST, shared, built, aiter=True)
            heading("tests")
            architectures = options.machine_code or (*machine_code.ARCHITECTURES, *machine_code.RELATIVES)
            outcomes = run_all(machine_code.suites(environment, share="all", architectures=architectures))
            return summarise(outcomes, began, everything=True)
        if options.release:
            heading("tests")
            chosen = {options.release: release(options.release, shared, built)}
            outcomes = run_all(plan(chosen, options.pytest, quick=not options.all))
            return summarise(outcomes, began, everything=True)
        environments = {NEWEST: release(NEWEST, shared, built)}
        with_aiter = release(NEWEST, shared, built, aiter=True)
        environments |= dict.fromkeys((WITH_AITER, INTERPRETED, INSTRUCTIONS), with_aiter)
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
        suites = plan(environments, options.pytest, quick=not options.all)
        if not options.pytest:
            suites += machine_code.default_suites(with_aiter, everything=options.all)
        outcomes += run_all(suites)
    return summarise(outcomes, began, everything=options.all)


def plan(environments: dict[str, Environment], extra: Sequence[str], *, quick: bool) -> list[Suite]:
    """All tests with the newest release, those that depend on the release with the others, and the separate suites."""
    selection = ["-m", "not slow"] if quick else []
    parts = [folder for folders in PARTS.values() for folder in folders]
    paths = [word for word in extra if (ROOT / word.split("::")[0]).exists()]
    flags = [word for word in extra if word not in paths]
    ignored = _ignoring((*SEPARATE.values(), MODELS, *PROCESSES, *parts))
    everything = ["tests", *ignored, *([] if extra else _ignoring(checks.RULES))]
    dependent = [f"tests/{name}" for name in RELEASE_DEPENDENT if (ROOT / "tests" / name).exists()]
    dependent += ["--ignore", FAULTS]
    suites = []
    for name, environment in environments.items():
        targets = everything if name == NEWEST else [SEPARATE[name]] if name in SEPARATE else dependent
        left_out = LEFT_OUT.get(name, ())
        targets = [*(target for target in targets if target not in left_out), *_ignoring(left_out)]
        if paths:
            targets = [path for path in paths if _separate_suite(path) == (name if name in SEPARATE else None)]
        if targets:
            share = PART if name == INTERPRETED and not extra else ()
            arguments = (*selection, *flags, *share, *targets)
            suites.append(Suite(f"transformers {name}", environment, arguments, may_be_empty=bool(extra)))
        if name not in SEPARATE and not paths:
            arguments = (*selection, *flags, MODELS, *_ignoring(left_out))
            suites.append(Suite(f"transformers {name}, every model", environment, arguments, may_be_empty=bool(extra)))
        if name in WITH_PROCESSES and not paths:
            skipped = () if name == NEWEST else OWN_PROCESSES
            arguments = (*selection, *flags, *PROCESSES, *_ignoring(skipped))
            suites.append(
                Suite(
                    f"transformers {name}, several processes", environment, arguments, may_be_empty=quick or bool(extra)
                )
            )
        if name == NEWEST and not paths:
            for part, folders in PARTS.items():
                arguments = (*selection, *flags, *folders)
                suites.append(Suite(f"transformers {name}, {part}", environment, arguments, may_be_empty=bool(extra)))
    return sorted(suites, key=_rank)


def _rank(suite: Suite) -> int:
    """The position of a suite in `LONGEST`. The longest suite starts first, so that the cores finish together."""
    return next((index for index, name in enumerate(LONGEST) if suite.name.endswith(name)), len(LONGEST))


def fetch_upstream(builder: Environment) -> None:
    """Fetch the files that the upstream tests need. If that fails, the tests are reported as not run."""
    try:
        source_distribution(NEWEST, builder)
    except ScriptError as error:
        echo(f"  {styled('not fetched', 'yellow')}  {str(error).strip().splitlines()[0]}")


def _ignoring(folders: Sequence[str]) -> list[str]:
    return [word for folder in folders for word in ("--ignore", folder)]


def _separate_suite(path: str) -> str | None:
    """The separate suite to which a path belongs, or None."""
    return next((name for name, folder in SEPARATE.items() if path.startswith(folder)), None)


def summarise(outcomes: Sequence[Outcome], began: float, *, everything: bool) -> int:
    """Print the table, the tests that did not run, and the total as the last line. Returns the exit code."""
    heading("summary")
    rows = [
        (outcome.name, str(outcome.passed), str(outcome.failed), str(outcome.skipped), duration(outcome.seconds))
        for outcome in outcomes
    ]
    table(("", "passed", "failed", "skipped", "time"), rows)
    not_run: Counter[str] = sum((outcome.not_run for outcome in outcomes), Counter())
    echo()
    for reason, command in HARDWARE.items():
        if not_run[reason] or not any(outcome.not_run for outcome in outcomes):
            echo(f"  {styled('not run', 'yellow')}  {command}: {reason} ({not_run[reason]} tests)")
    for reason in sorted(set(not_run) - set(HARDWARE)):
        echo(f"  {styled('not run', 'yellow')}  {reason} ({not_run[reason]} tests)")
    for version in set(RELEASES) - set(RUNNABLE):
        needed = ".".join(map(str, NEEDS_PYTHON[version]))
        echo(f"  {styled('not run', 'yellow')}  transformers {version}: needs Python {needed}")
    if not everything:
        echo(f"  {styled('not run', 'yellow')}  slow tests and the other releases: scripts/test --all")
    passed, failed = sum(outcome.passed for outcome in outcomes), sum(outcome.failed for outcome in outcomes)
    skipped = sum(outcome.skipped for outcome in outcomes)
    echo(f"\n  {duration(time.monotonic() - began)} in all\n")
    empty = bool(outcomes) and not passed + failed + skipped
    if empty:
        echo("error: no test was selected; check the paths and -k after --")
    echo(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or empty else 0
