"""Starts run in new processes with temporary caches, and a failed start reports the reason."""

from __future__ import annotations

import pytest

from hf_rocm.tools.bench.cases import Case
from hf_rocm.tools.bench.cold_start import StartError, start, starts
from hf_rocm.tools.bench.run import Subject
from tests.tools.bench.conftest import CPU

CASE = Case("decode", 1, 8, 3)


@pytest.mark.slow
def test_only_the_first_start_has_cold_caches():
    done = starts(Subject(None, "small", CPU, layers=1), CASE, ["hf_rocm"], segment="x", progress=lambda text: None)
    assert [(run["side"], run["caches"]) for run in done.starts] == [("hf_rocm", "cold"), ("hf_rocm", "cached")]
    for run in done.starts:
        assert run["first_call"] > 0 and run["warmup"] >= 0 and run["prepared"] > 0
        assert run["static_cache"] == 11 * 2 * 2 * 64 * 4 and run["weights"] > run["static_cache"]
    assert done.model["name"] == "small, 1 layer"


def test_a_failed_start_reports_the_reason(tmp_path):
    with pytest.raises(StartError) as error:
        start(Subject(None, "no-such-shape", CPU), CASE, "hf_rocm", tmp_path)
    assert "no-such-shape" in str(error.value) and "exit code" in error.value.facts
