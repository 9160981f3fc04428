"""docs/promises.md and the list of mutations cover every promise, and the tests that they name exist."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from hf_rocm.overlay.audit import Finding
from hf_rocm.overlay.state import Installed, Match

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent
PAGE = ROOT / "docs" / "promises.md"
ALL = set(range(1, 25))
_TEST = re.compile(r"^def (test_(\d\d)(?:_and_(\d\d))?_\w+)", re.MULTILINE)


def _promised() -> dict[int, set[str]]:
    result: dict[int, set[str]] = {}
    for file in HERE.glob("test_*.py"):
        for name, first, second in _TEST.findall(file.read_text(encoding="utf-8")):
            for number in filter(None, (first, second)):
                result.setdefault(int(number), set()).add(f"{file.name}::{name}")
    return result


def test_every_promise_has_a_test_named_after_it_and_the_page_links_to_it() -> None:
    tests = _promised()
    assert tests.keys() == ALL
    rows = re.findall(
        r"^\| (\d+) \| .* \| \[test_(\d\d)\]\((\S+)\) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {int(number) for number, _, _ in rows} == ALL and len(rows) == len(ALL)
    for number, named, link in rows:
        assert number == str(int(named))
        assert (PAGE.parent / link).is_file()
        assert any(test.startswith(f"{Path(link).name}::") for test in tests[int(number)]), number


def test_every_promise_has_a_mutation_that_applies_and_names_a_test_of_that_promise() -> None:
    tests, seen = _promised(), set()
    for mutation in script("mutate-patcher").mutations():
        promise = int(mutation["promise"])
        assert mutation["test"].split("[")[0] in tests[promise], mutation["test"]
        seen.add(promise)
    assert seen == ALL


def test_the_page_has_every_state() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for states in (Installed, Match, Finding):
        for state in states:
            assert f"| `{state.value}` | " in text, state


def script(name: str) -> ModuleType:
    loader = SourceFileLoader(name.replace("-", "_"), str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    written = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = written
    return module
