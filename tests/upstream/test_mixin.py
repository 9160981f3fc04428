"""transformers' own ModelTesterMixin on tiny models: tests that pass with stock also pass with overlays.

The mixin's tests run once with stock and once with overlays, in separate processes (scripts/lib/upstream_passes.py).
The mixin is from the installed release's source distribution, which scripts/test fetches. Without that distribution,
these tests are skipped.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import hf_rocm

ROOT = Path(__file__).resolve().parents[2]

# One model of each kind. scripts/run-upstream-tests runs the mixin on any model.
MODELS = ("gemma3", "deepseek_v3", "bert", "whisper")

# For every model, more than this number of tests pass with stock. Otherwise, pytest did not find all tests.
FEWEST = 60

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def lib():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        from lib import upstream_differences, upstream_passes, upstream_tree

        yield SimpleNamespace(differences=upstream_differences, passes=upstream_passes, tree=upstream_tree)


@pytest.fixture(scope="session")
def comparison(lib, tmp_path_factory):
    release = importlib.metadata.version("transformers")
    mixins = lib.tree.fetched(release)
    if mixins is None:
        pytest.skip(f"not run: needs the source distribution of transformers {release}, which scripts/test fetches")
    scratch = tmp_path_factory.mktemp("upstream")
    files = tuple(lib.tree.from_mixins(scratch / "tree", mixins, MODELS))
    # an installed wheel is on the import path, but a checkout is not
    root = Path(hf_rocm.__file__).parents[1]
    interpreter = lib.passes.Interpreter(Path(sys.executable), () if root.name == "site-packages" else (root,))
    results = {}
    for name, site in (("stock", None), ("overlaid", lib.passes.overlaid_site(interpreter, scratch / "site"))):
        settings = lib.passes.Pass(interpreter, scratch / "tree", files, scratch / f"{name}.jsonl", site)
        results[name] = lib.passes.run(settings)
    return lib.differences.compare(release, results["stock"], results["overlaid"], lib.differences.listed())


@pytest.mark.parametrize("model", MODELS)
def test_tests_that_pass_with_stock_pass_with_overlays(model, comparison, lib):
    own = [test for test in comparison.stock if lib.tree.model_of(test) == model]
    assert sum(comparison.stock[test].outcome == "passed" for test in own) > FEWEST
    assert {test: comparison.overlaid[test].reason for test in comparison.regressions if test in own} == {}


@pytest.mark.parametrize("model", MODELS)
def test_forwards_of_overlays_ran(model, comparison):
    assert comparison.hits(model), f"no forward of an overlay was called in the tests of {model}"


def test_listed_differences_still_occur(comparison):
    assert comparison.stale == ()


def test_nothing_crashed_or_hung(comparison):
    outcomes = {result.outcome for side in (comparison.stock, comparison.overlaid) for result in side.values()}
    assert not outcomes & {"crashed", "timeout"}
