"""The committed record of served features equals the current observations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.coverage.case import RELEASE, Case
from tests.coverage.cases import CASES
from tests.coverage.observed import FEATURES, NONE, YES, _joined, _rank, merged, observed

RECORDS = Path(__file__).resolve().parents[2] / "docs" / "support"
FILE = RECORDS / f"{transformers.__version__}.json"
OVERLAYS = sorted({case.overlay for case in CASES if case.applies})

# there are no claims about a release without a record
pytestmark = pytest.mark.skipif(not FILE.is_file(), reason="nothing is recorded for this release")


@pytest.fixture(scope="module")
def recorded():
    return json.loads(FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def observations():
    """The observed rows by overlay and case."""
    return {}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_observation_is_better_than_the_record(overlay, recorded, observations):
    for case in CASES:
        if case.overlay == overlay and case.applies:
            for name, row in observed(case).items():
                observations.setdefault(name, []).append({**row, "cases": [case.id]})
                assert name in recorded, f"{name} is served and not recorded: python -m tests.coverage.observed"
                assert case.id in recorded[name]["cases"]
                for feature, mark in row["support"].items():
                    best = recorded[name]["support"][feature]
                    assert _rank(best) <= _rank(mark), f"{name}: {feature} is better than recorded: {mark}"


def test_every_entry_was_observed(recorded, observations):
    """This test runs after the test above, whose merged observations must equal the record."""
    if {case for rows in observations.values() for row in rows for case in row["cases"]} != {
        c.id for c in CASES if c.applies
    }:
        pytest.skip("not every case ran")
    assert {name: _joined(rows) for name, rows in sorted(observations.items())} == recorded


def test_a_mark_requires_an_operation_of_hf_rocm(recorded):
    needed = {
        "attention": {"attend_into_cache", "attention", "decode_attention", "varlen_attention"},
        "norm": {"rms_norm"},
        "add+norm": {"add_rms_norm", "add_layer_norm", "fused_linear"},
        "rope": {"rope"},
        "activation": {"act_and_mul"},
        "MoE": {"experts", "shuffled_experts"},
        "fused QKV": {"linear"},
        "fused gate/up": {"linear"},
    }
    for name, row in recorded.items():
        assert tuple(row["support"]) == FEATURES
        ran = {operation for operations in row["classes"].values() for operation in operations}
        for feature, mark in row["support"].items():
            if feature != "recorded" and mark.split(",")[0] == YES:
                assert needed[feature] & ran, (name, feature)


def test_models_that_are_not_recorded_have_a_reason(recorded):
    """Models of each kind are recorded and replayed in tests/generation and tests/forwards."""
    marks = {name: row["support"]["recorded"] for name, row in recorded.items()}
    assert marks["llama"] == marks["bert"] == YES
    assert marks["bloom"] == "stock: its position biases (ALiBi) are computed from the mask"
    assert all(mark == YES or mark.startswith("stock: ") for mark in marks.values())


class Eager(Case):
    """A case whose model uses eager attention."""

    def build(self, dtype=torch.float32):
        model = super().build(dtype)
        model.config._attn_implementation = "eager"
        return model


def test_stock_features_are_not_marked():
    case = next(case for case in CASES if case.id == "llama")
    row = observed(Eager(case.overlay, case.model, case.config, case.arguments, case.attention))["llama"]
    assert row["support"]["attention"].startswith("stock: the attention implementation 'eager' is selected")
    assert (
        row["support"]["rope"].startswith("stock: ")
        and row["support"]["fused QKV"] == "stock: its attention stays stock"
    )
    assert row["support"]["fused gate/up"] == row["support"]["norm"] == YES


def test_a_stock_model_has_no_row(monkeypatch):
    monkeypatch.setattr("hf_rocm.prepare", lambda model, **_: model)
    assert observed(next(case for case in CASES if case.id == "llama")) == {}


def test_rows_of_two_configurations_are_merged():
    def row(mark, operations):
        return {"overlay": "a/b", "classes": {"C": operations}, "support": {"rope": mark}}

    result = merged([row(NONE, ["linear"]), row("stock: why", []), row(YES, ["rope"])])
    assert result["support"]["rope"] == YES and result["classes"]["C"] == ["linear", "rope"]
    assert merged([row(NONE, []), row("stock: why", [])])["support"]["rope"] == "stock: why"


@pytest.mark.skipif(not str(RELEASE).startswith("5.23"), reason="the numbers are those of the newest release")
def test_the_pages_equal_the_record():
    import subprocess
    import sys

    script = RECORDS.parents[1] / "scripts" / "support-matrix"
    result = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
