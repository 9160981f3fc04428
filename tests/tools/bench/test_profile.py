"""Kernel times are summed, times without kernels count as gaps, and a trace is written."""

from __future__ import annotations

import json

import pytest

from hf_rocm.tools.bench import profile as profiling
from hf_rocm.tools.bench.cases import Case
from hf_rocm.tools.bench.profile import Work, summarise
from hf_rocm.tools.bench.run import Subject
from tests.tools.bench.conftest import CPU


def test_gaps_are_times_without_kernels():
    work = [Work("gemm", 10, 30), Work("norm", 40, 50), Work("gemm", 45, 60), Work("add", 80, 90)]
    summary = summarise("x", work, 2)
    assert summary.kernels == {"gemm": (2, 35.0), "norm": (1, 10.0), "add": (1, 10.0)}
    assert (summary.busy, summary.span) == (25.0, 40.0)
    assert summary.gaps == ((20.0, "add"), (10.0, "norm"))
    assert summary.rows()[0] == ("gemm", "1.0", "17.5", "63.6 %")
    assert "idle for 15 (38 %)" in summary.lines()[0] and "20 µs before add; 10 µs before norm" in summary.lines()[1]
    assert summarise("x", [], 1).lines() == []


@pytest.mark.parametrize("case", [Case("decode", 1, 8, 4), Case("prefill", 1, 8)], ids=["decode", "prefill"])
def test_a_profile_of_a_model_has_its_gemms_and_a_trace(case, tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "STEPS", 3)
    trace = tmp_path / "deep" / "trace.json"
    subject = Subject(None, "small", CPU, layers=1)
    summary = profiling.profile(subject, case, trace, progress=lambda text: None)
    names = [row[0] for row in summary.rows()]
    assert "aten::mm" in names or "aten::addmm" in names
    # One run per step.
    assert summary.kernels["aten::embedding"][0] == 3
    # There are no gaps on a CPU.
    assert not summary.lines()
    assert json.loads(trace.read_text())["traceEvents"]
