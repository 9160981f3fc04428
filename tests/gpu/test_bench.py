"""The benchmark on a GPU: recorded steps are timed, and memory and idle time are measured."""

from __future__ import annotations

import pytest
import torch

from hf_rocm.tools.bench import profile as profiling
from hf_rocm.tools.bench import rates, run
from hf_rocm.tools.bench.cases import Case
from hf_rocm.tools.bench.clock import device_time

pytestmark = pytest.mark.gpu

DECODE = Case("decode", 2, 64, 32)


def test_a_decode_case_is_timed_with_recorded_steps():
    subject = run.Subject(None, "small", torch.device("cuda:0"))
    report = run.bench(subject, [DECODE], ["stock", "hf_rocm"], rounds=2, segment="x", progress=lambda text: None)
    stock, prepared = report.results[0].timings
    assert "steps replayed" in prepared.note and not prepared.note.startswith("0 ") and stock.note is None
    assert 0 < prepared.replay < prepared.unit.median and stock.replay is None
    weights = 2 * report.model["parameters"]
    for timing in (stock, prepared):
        assert timing.parity.refusal is None and weights < timing.peak < weights + 2**30


def test_rates_are_those_of_a_gpu_and_exclude_launches():
    device = torch.device("cuda:0")
    result = rates.measure(device, torch.bfloat16)
    assert result.copy > 1e11 and result.matmul > 1e12
    x = torch.ones(64, device=device)
    recorded, launched = (min(device_time([lambda: x.add_(1)] * 32, device, record=mode)) for mode in (True, False))
    assert 0 < recorded < launched


def test_a_profile_has_kernels_and_gaps(tmp_path):
    summary = profiling.profile(
        run.Subject(None, "small", torch.device("cuda:0")),
        DECODE,
        tmp_path / "trace.json",
        progress=lambda text: None,
        side="stock",
    )
    assert 0 < summary.busy < summary.span and summary.kernels and "idle for" in summary.lines()[0]
