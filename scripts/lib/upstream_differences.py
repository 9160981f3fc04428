"""Compare the tests that pass only without overlays with the list of unavoidable differences."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from lib.console import ScriptError
from lib.upstream_detected import Detected
from lib.upstream_passes import Result
from lib.upstream_tree import PREPARED, model_of

LISTED = PREPARED / "differences.toml"

ABSENT = Result("absent")


@dataclass(frozen=True)
class Unavoidable:
    """An entry of the list. models, releases and test are patterns; test matches the method's name with its
    parameters."""

    models: tuple[str, ...]
    releases: tuple[str, ...]
    test: str
    reason: str

    def covers(self, test: str, release: str) -> bool:
        named = test.split("::")[-1]
        return self._is_about(test, release) and fnmatchcase(named, self.test)

    def _is_about(self, test: str, release: str) -> bool:
        model = model_of(test)
        return any(fnmatchcase(release, entry) for entry in self.releases) and any(
            fnmatchcase(model, entry) for entry in self.models
        )


@dataclass(frozen=True)
class Comparison:
    """The results of both passes: without and with overlays.

    regressions: tests that pass only without overlays and aren't listed. unavoidable: such tests that are listed.
    repaired: tests that pass only with overlays. stale: entries whose tests ran and don't differ. idle: models whose
    overlaid forwards were never called.
    """

    release: str
    stock: Mapping[str, Result]
    overlaid: Mapping[str, Result]
    regressions: tuple[str, ...]
    unavoidable: Mapping[str, Unavoidable]
    repaired: tuple[str, ...]
    stale: tuple[Unavoidable, ...]
    idle: tuple[str, ...]

    @property
    def failed(self) -> bool:
        return bool(self.regressions or self.stale or self.idle)

    def hits(self, model: str) -> Counter[str]:
        """The number of calls of the model's overlaid forwards in all of its tests, by class."""
        counted = (result.hits for test, result in self.overlaid.items() if model_of(test) == model)
        return sum(counted, Counter())


def compare(
    release: str, stock: Mapping[str, Result], overlaid: Mapping[str, Result], listed: Sequence[Unavoidable]
) -> Comparison:
    """Compare the passes of one release with each other and with the list."""
    regressions, unavoidable, repaired = [], {}, []
    for test in sorted(stock.keys() | overlaid.keys()):
        before, after = stock.get(test, ABSENT).outcome, overlaid.get(test, ABSENT).outcome
        if before == after or "passed" not in (before, after):
            continue
        entry = next((difference for difference in listed if difference.covers(test, release)), None)
        if after == "passed":
            repaired.append(test)
        elif entry is None:
            regressions.append(test)
        else:
            unavoidable[test] = entry
    seen = [difference for difference in listed if any(difference.covers(test, release) for test in stock)]
    stale = [difference for difference in seen if difference not in unavoidable.values()]
    comparison = Comparison(
        release, stock, overlaid, tuple(regressions), unavoidable, tuple(repaired), tuple(stale), ()
    )
    models = sorted({model_of(test) for test in stock})
    idle = tuple(model for model in models if not comparison.hits(model))
    return Comparison(**{**vars(comparison), "idle": idle})


def listed(file: Path = LISTED) -> list[Unavoidable]:
    """The repository's list. Raises `ScriptError` if an entry has missing or unknown fields or an empty reason, or if
    no TOML parser is installed."""
    # Python has tomllib from 3.11 on; for older versions, hf-rocm depends on tomli
    reader = next((name for name in ("tomllib", "tomli") if importlib.util.find_spec(name)), None)
    if reader is None:
        raise ScriptError(f"reading {file.name} needs Python 3.11 or newer, or tomli")
    entries = importlib.import_module(reader).loads(file.read_text(encoding="utf-8")).get("difference", [])
    for entry in entries:
        if set(entry) != {"models", "releases", "test", "reason"} or not entry["reason"].strip():
            raise ScriptError(f"an entry of {file.name} needs models, releases, test and reason\n  found  {entry}")
    return [
        Unavoidable(tuple(entry["models"]), tuple(entry["releases"]), entry["test"], entry["reason"])
        for entry in entries
    ]


def as_json(comparison: Comparison, sources: Mapping[str, str], detected: Sequence[Detected] = ()) -> str:
    """The JSON of all results, by test class and test, with one test per line. sources: the origin of the tests."""
    models = sorted({model_of(test) for test in comparison.stock})
    summary: dict[str, object] = {
        "transformers": comparison.release,
        "sources": dict(sources),
        "regressions": list(comparison.regressions),
        "unavoidable": {test: entry.reason for test, entry in comparison.unavoidable.items()},
        "repaired": list(comparison.repaired),
        "stale": [entry.test for entry in comparison.stale],
        "idle": list(comparison.idle),
        "hits": {model: dict(sorted(comparison.hits(model).items())) for model in models},
    }
    if detected:
        summary["faults"] = [fault._asdict() for fault in detected]
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in summary.items()]
    classes: dict[str, list[str]] = {}
    for test in sorted(comparison.stock.keys() | comparison.overlaid.keys()):
        test_class, _, name = test.rpartition("::")
        classes.setdefault(test_class, []).append(f"   {json.dumps(name)}: {json.dumps(_entry(comparison, test))}")
    bodies = (
        f"  {json.dumps(test_class)}: {{\n" + ",\n".join(entries) + "\n  }" for test_class, entries in classes.items()
    )
    return "\n".join(["{", *lines, ' "tests": {', ",\n".join(bodies), " }", "}", ""])


def _entry(comparison: Comparison, test: str) -> dict[str, object]:
    before, after = comparison.stock.get(test, ABSENT), comparison.overlaid.get(test, ABSENT)
    entry: dict[str, object] = {"stock": before.outcome, "overlaid": after.outcome}
    if hits := sum(after.hits.values()):
        entry["hits"] = hits
    if reasons := list(dict.fromkeys(result.reason[:100] for result in (before, after) if result.reason)):
        entry["reason"] = " | ".join(reasons)
    return entry
