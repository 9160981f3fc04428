"""scripts/run-upstream-tests: run transformers' own tests of a model with and without overlays, and compare."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lib.console import duration, echo, heading, line, step, styled, table
from lib.environments import ENVIRONMENTS, RUNNABLE, Environment, base, lock, release, wheel
from lib.upstream_detected import detect, parity, print_detected
from lib.upstream_differences import Comparison, as_json, compare, listed
from lib.upstream_passes import Interpreter, Pass, Result, overlaid_site, run
from lib.upstream_tree import from_checkout, from_mixins, model_of, source_distribution

DESCRIPTION = """\
Run transformers' own tests of each MODEL in the environment of RELEASE, first with stock, then with the overlays
installed in a copy of transformers and enabled by HF_ROCM_FORCE=1. Print the tests that pass with stock and fail with
overlays.

Without --source, the shared mixins of the release's source distribution are applied to thin test classes
(tests/upstream). A model's own test file is only in transformers' public repository: pass a checkout of it.
"""

EPILOG = """\
Exit codes: 0 no test passes with stock and fails with overlays, except those that tests/upstream/differences.toml lists
with a reason; 1 a test does, a listed difference no longer occurs, an overlay never ran, or the tests could not be
run; 2 a usage error.
"""

OUTCOMES = ("passed", "failed", "skipped", "network", "timeout", "crashed")


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 0 or 1, as described in EPILOG."""
    options = _parser().parse_args(arguments)
    models = list(dict.fromkeys(options.models))
    began = time.monotonic()
    with lock(), tempfile.TemporaryDirectory(prefix="hf-rocm-upstream-") as scratch:
        heading("set-up")
        environment, pip = _environments(options)
        needs_mixins = options.release_mixins or not options.source
        mixins = source_distribution(options.release, pip) if needs_mixins else None
        tree = Path(scratch) / "tree"
        if options.source:
            files = from_checkout(tree, options.source, models, mixins=mixins)
        else:
            assert mixins is not None
            files = from_mixins(tree, mixins, models)
        interpreter = Interpreter(environment.python)
        with step("overlays, installed into a copy of transformers"):
            site = overlaid_site(interpreter, Path(scratch) / "site")
        heading("tests")
        passes = {}
        for name, folder in (("stock", None), ("overlaid", site)):
            log = Path(scratch) / f"{name}.jsonl"
            with step(f"transformers {options.release}, {name}"):
                settings = Pass(interpreter, tree, tuple(files), log, folder, options.timeout, tuple(options.pytest))
                settings = replace(settings, spread=options.spread)
                passes[name] = run(settings)
        detected = detect(settings, passes["stock"], passes["overlaid"]) if options.faults else []
        detected += parity(interpreter, Path(scratch), models) if options.faults else []
    comparison = compare(options.release, passes["stock"], passes["overlaid"], listed())
    show(comparison)
    print_detected(detected)
    if options.json:
        sources = {"tests": options.source_name or str(options.source or "thin classes of hf_rocm")}
        sources["mixins"] = f"source distribution of transformers {options.release}" if mixins else sources["tests"]
        sources["weights"] = f"{options.spread:g} times the standard deviation of transformers' initial weights"
        options.json.write_text(as_json(comparison, sources, detected), encoding="utf-8")
    echo(f"\n  {duration(time.monotonic() - began)} in all")
    return 1 if comparison.failed else 0


def show(comparison: Comparison) -> None:
    """Print the counts by model, then every regression and listed difference with its reason."""
    heading("summary")
    rows = []
    for model in sorted({model_of(test) for test in comparison.stock}):
        for name, results in (("stock", comparison.stock), ("overlaid", comparison.overlaid)):
            counts = _counts(model, results)
            hits = str(sum(comparison.hits(model).values())) if name == "overlaid" else ""
            rows.append((f"{model}, {name}", *(str(counts[outcome]) for outcome in OUTCOMES), hits))
    table(("", *OUTCOMES, "hf_rocm's forwards"), rows)
    echo()
    for test in comparison.regressions:
        after = comparison.overlaid.get(test)
        echo(f"  {styled('regression', 'red')}   {test}\n      {after.reason if after else 'was not run'}")
    for test, entry in comparison.unavoidable.items():
        echo(f"  {styled('unavoidable', 'yellow')}  {test}\n      {entry.reason}")
    for entry in comparison.stale:
        named = f"{entry.test} ({', '.join(entry.models)})"
        echo(f"  {styled('stale', 'red')}        {named} is listed but no longer differs")
    for model in comparison.idle:
        echo(f"  {styled('idle', 'red')}         {model}: no forward of hf_rocm was called")
    if comparison.repaired:
        echo(f"  tests that fail with stock and pass with overlays: {len(comparison.repaired)}")
    result = "failed" if comparison.failed else "passed"
    count = len(comparison.regressions)
    line(f"{count} regression{'s' * (count != 1)}", result, "red" if comparison.failed else "green")


def _counts(model: str, results: Mapping[str, Result]) -> Counter[str]:
    return Counter(result.outcome for test, result in results.items() if model_of(test) == model)


def _environments(options: argparse.Namespace) -> tuple[Environment, Environment]:
    """The environment in which the tests run, and one with pip."""
    if options.environment:
        return (Environment(options.environment),) * 2
    shared = base()
    return release(options.release, shared, wheel(shared, ENVIRONMENTS / "wheel")), shared


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/run-upstream-tests",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("release", metavar="RELEASE", choices=RUNNABLE, help=", ".join(RUNNABLE))
    parser.add_argument(
        "models", metavar="MODEL", nargs="+", type=_model, help="the name of a model's folder, such as llama"
    )
    parser.add_argument("--source", type=_folder, metavar="PATH", help="a checkout of transformers, of any commit")
    parser.add_argument("--source-name", metavar="TEXT", help="the source's name in the JSON file, such as a commit")
    parser.add_argument(
        "--release-mixins",
        action="store_true",
        help="with --source: use the shared mixins of RELEASE's distribution",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome of every test in both passes")
    parser.add_argument(
        "--faults",
        action="store_true",
        help="afterwards, inject faults into the overlaid forwards one by one, and count the tests that detect them, "
        "among those that ran a forward of hf_rocm and among hf_rocm's parity tests",
    )
    parser.add_argument(
        "--spread",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="multiply the standard deviation of transformers' initial weights by this factor (only with 5.x), because "
        "attention with the default weights is nearly uniform",
    )
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds per test (default 120)")
    parser.add_argument("--environment", type=_folder, metavar="PATH", help="a virtual environment to use")
    parser.add_argument(
        "--pytest", action="append", default=[], metavar="ARG", help="an argument for pytest, such as --pytest=-kname"
    )
    return parser


def _model(text: str) -> str:
    if not text.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a model")
    return text


def _folder(text: str) -> Path:
    path = Path(text).absolute()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return path
