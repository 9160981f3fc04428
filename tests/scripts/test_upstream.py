"""run-upstream-tests: the differences that are regressions or must be listed, and the effect of a crash."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]

PREFIX = "tests/models/llama/test_modeling_llama.py::LlamaModelTest::"

# Tests like those of transformers, with different outcomes.
TESTS = """
import os, random, signal, time, unittest, urllib.request

DRAWN = []

class LlamaModelTest(unittest.TestCase):
    def test_a_passes(self):
        pass

    def test_b_fails(self):
        self.assertEqual(1, 2)

    def test_c_crashes(self):
        os.abort()

    def test_d_hangs(self):
        while True:
            try:
                time.sleep(1)
            except Exception:
                pass

    def test_e_ignores_its_alarm(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        time.sleep(600)

    def test_f_needs_the_network(self):
        import socket
        try:
            socket.create_connection(("192.0.2.1", 80), timeout=1)
        except OSError as error:
            raise ValueError("no connection") from error

    @unittest.skip("not today")
    def test_g_is_skipped(self):
        pass

    def test_h_has_a_bad_part(self):
        with self.subTest("part"):
            self.fail("this part")

    def test_i_draws(self):
        raise AssertionError(random.random())
"""


@pytest.fixture
def lib(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from lib import console, upstream, upstream_differences, upstream_passes, upstream_tree

    return SimpleNamespace(
        differences=upstream_differences,
        passes=upstream_passes,
        tree=upstream_tree,
        main=upstream.main,
        console=console,
    )


@pytest.fixture
def settings(lib: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Settings of a pass over `TESTS` that does not need transformers."""
    monkeypatch.setattr(lib.passes, "_link_sources", lambda settings: None)
    monkeypatch.setattr(lib.passes, "GRACE", 10.0)
    file = tmp_path / "tree" / "tests" / "models" / "llama" / "test_modeling_llama.py"
    file.parent.mkdir(parents=True)
    file.write_text(TESTS)
    (tmp_path / "tree" / "pytest.ini").write_text(lib.tree.CONFIGURATION)
    interpreter = lib.passes.Interpreter(Path(sys.executable), tuple(map(Path, sys.path)))
    files = ("tests/models/llama/test_modeling_llama.py",)
    return lib.passes.Pass(interpreter, tmp_path / "tree", files, tmp_path / "log.jsonl", None, 3.0)


@pytest.mark.slow
def test_one_bad_test_does_not_affect_the_others(lib: SimpleNamespace, settings) -> None:
    results = lib.passes.run(settings)
    assert {test.split("::test_")[1]: result.outcome for test, result in results.items()} == {
        "a_passes": "passed",
        "b_fails": "failed",
        "c_crashes": "crashed",
        "d_hangs": "timeout",
        "e_ignores_its_alarm": "timeout",
        "f_needs_the_network": "network",
        "g_is_skipped": "skipped",
        "h_has_a_bad_part": "failed",
        "i_draws": "failed",
    }
    assert results[f"{PREFIX}test_g_is_skipped"].reason == "not today"
    again = lib.passes.run(settings)
    drawn = f"{PREFIX}test_i_draws"
    # Both passes draw the same random numbers.
    assert again[drawn].reason == results[drawn].reason


@pytest.mark.slow
def test_tests_that_cannot_be_imported_are_an_error(lib: SimpleNamespace, settings) -> None:
    (settings.tree / settings.files[0]).write_text("import no_such_module")
    with pytest.raises(lib.console.ScriptError, match="no_such_module"):
        lib.passes.run(settings)


def results(lib: SimpleNamespace, hits: int = 1, **outcomes: str):
    return {
        f"{PREFIX}test_{name}": lib.passes.Result(outcome, hits=Counter({"LlamaMLP": hits}))
        for name, outcome in outcomes.items()
    }


@pytest.mark.parametrize("after", ["failed", "skipped", "network", "timeout", "crashed", "absent"])
def test_tests_that_passed_with_stock_must_pass_with_overlays(after: str, lib: SimpleNamespace) -> None:
    overlaid = results(lib, one="passed") | ({} if after == "absent" else results(lib, two=after))
    result = lib.differences.compare("5.23.0", results(lib, one="passed", two="passed"), overlaid, [])
    assert result.regressions == (f"{PREFIX}test_two",) and result.failed


@pytest.mark.parametrize("before", ["failed", "skipped", "timeout"])
def test_tests_that_did_not_pass_with_stock_are_not_regressions(before: str, lib: SimpleNamespace) -> None:
    stock, overlaid = results(lib, one="passed", two=before), results(lib, one="passed", two="passed")
    result = lib.differences.compare("5.23.0", stock, overlaid, [])
    assert result.repaired == (f"{PREFIX}test_two",) and not result.failed


def test_a_listed_difference_needs_its_model_and_release(lib: SimpleNamespace) -> None:
    stock, overlaid = results(lib, one="passed", two="passed"), results(lib, one="passed", two="failed")
    entry = lib.differences.Unavoidable(("lla*",), ("5.*",), "test_two", "it reads the source")
    result = lib.differences.compare("5.23.0", stock, overlaid, [entry])
    assert not result.failed and result.unavoidable == {f"{PREFIX}test_two": entry}
    assert lib.differences.compare("4.57.6", stock, overlaid, [entry]).failed
    other = lib.differences.Unavoidable(("gemma",), ("5.*",), "test_two", "it reads the source")
    assert lib.differences.compare("5.23.0", stock, overlaid, [other]).failed


def test_a_listed_difference_that_no_longer_occurs_fails(lib: SimpleNamespace) -> None:
    entry = lib.differences.Unavoidable(("*",), ("*",), "test_two", "it reads the source")
    result = lib.differences.compare("5.23.0", results(lib, two="passed"), results(lib, two="passed"), [entry])
    assert result.stale == (entry,) and result.failed
    # the test of this entry did not run
    assert not lib.differences.compare("5.23.0", results(lib, a="passed"), results(lib, a="passed"), [entry]).failed


def test_an_overlay_that_never_ran_fails(lib: SimpleNamespace) -> None:
    result = lib.differences.compare("5.23.0", results(lib, a="passed"), results(lib, hits=0, a="passed"), [])
    assert result.idle == ("llama",) and result.failed


def test_every_listed_difference_has_a_reason(lib: SimpleNamespace, tmp_path: Path) -> None:
    assert all(entry.reason for entry in lib.differences.listed())
    file = tmp_path / "differences.toml"
    file.write_text('[[difference]]\nmodels = ["a"]\nreleases = ["*"]\ntest = "b"\nreason = " "\n')
    with pytest.raises(lib.console.ScriptError, match="reason"):
        lib.differences.listed(file)


def test_the_json_has_every_outcome(lib: SimpleNamespace) -> None:
    result = lib.differences.compare("5.23.0", results(lib, a="passed", b="failed"), results(lib, a="passed"), [])
    data = json.loads(lib.differences.as_json(result, {"tests": "commit"}))
    assert data["tests"][PREFIX.removesuffix("::")] == {
        "test_a": {"stock": "passed", "overlaid": "passed", "hits": 1},
        "test_b": {"stock": "failed", "overlaid": "absent"},
    }
    assert data["sources"] == {"tests": "commit"} and data["hits"] == {"llama": {"LlamaMLP": 1}}


def test_a_folder_without_the_tests_is_refused(lib: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(lib.console.ScriptError, match="not a source tree"):
        lib.tree.from_checkout(tmp_path / "tree", tmp_path, ["llama"])
    with pytest.raises(lib.console.ScriptError, match="no overlay of nobodys"):
        lib.tree.from_mixins(tmp_path / "tree", tmp_path, ["nobodys"])


def test_a_model_without_a_tester_class_uses_that_of_a_causal_model(lib: SimpleNamespace, tmp_path: Path) -> None:
    files = lib.tree.from_mixins(tmp_path / "tree", ROOT / "tests" / "upstream" / "standins", ["qwen2", "mixtral"])
    plain, own = ((tmp_path / "tree" / file).read_text() for file in files)
    assert "class Qwen2ModelTest(CausalTest, unittest.TestCase):" in plain and "model_type = 'qwen2'" in plain
    assert own == (ROOT / "tests" / "upstream" / "thin" / "mixtral.py").read_text()


@pytest.mark.parametrize("arguments", [[], ["5.23.0"], ["9.9", "llama"], ["5.23.0", "../llama"], ["--no-such"]])
def test_wrong_usage_has_its_own_exit_code(arguments: list[str]) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "run-upstream-tests"), *arguments]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (
            [],
            {
                "newest": "--ignore tests/upstream",
                "upstream": "tests/upstream",
                "models": "tests/coverage",
                "processes": "tests/distributed",
                "the patcher": "tests/overlay",
                "tools": "tests/tools",
            },
        ),
        (["tests/ops"], {"newest": "tests/ops"}),
        (["tests/upstream/test_mixin.py"], {"upstream": "tests/upstream/test_mixin.py"}),
    ],
)
def test_the_upstream_tests_are_a_separate_suite(paths, expected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from lib import environments, testing

    names = {
        testing.NEWEST: "newest",
        testing.UPSTREAM: "upstream",
        f"{testing.NEWEST}, every model": "models",
        f"{testing.NEWEST}, several processes": "processes",
        **{f"{testing.NEWEST}, {part}": part for part in testing.PARTS},
    }
    nowhere = environments.Environment(Path("nowhere"))
    suites = testing.plan(dict.fromkeys((testing.NEWEST, testing.UPSTREAM), nowhere), paths, quick=False)
    text = {names[suite.name.removeprefix("transformers ")]: " ".join(suite.arguments) for suite in suites}
    assert text.keys() == expected.keys()
    assert all(words in text[name] for name, words in expected.items())


@pytest.mark.parametrize("release", ["5.23.0", "4.57.6"])
def test_the_documentation_shows_the_recorded_runs(release: str) -> None:
    recorded = json.loads((ROOT / "docs" / "upstream-tests" / f"{release}.json").read_text())
    assert recorded["regressions"] == recorded["stale"] == recorded["idle"] == []
    page = (ROOT / "docs" / "upstream-tests.md").read_text()
    assert recorded["sources"]["tests"].split()[-1] in page
    for model, hits in recorded["hits"].items():
        pairs = [
            (test["stock"], test["overlaid"])
            for test_class, tests in recorded["tests"].items()
            if test_class.split("/")[2] == model
            for test in tests.values()
        ]
        passed, failed, skipped = (pairs.count((outcome,) * 2) for outcome in ("passed", "failed", "skipped"))
        cells = (release, model, len(pairs), passed, passed, 0, failed, skipped, sum(hits.values()))
        assert f"| {' | '.join(map(str, cells))} |" in page
