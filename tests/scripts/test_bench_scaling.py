"""The tables in docs/multi-gpu.md equal the computed ones, and notes on runs on several GPUs name the interconnect."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_rocm.tools.bench import known_shapes, scaling
from hf_rocm.tools.bench.cases import Case
from tests.tools.bench.conftest import result, segment

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lib(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from lib import bench_plan, bench_render, bench_scaling, data_sheets

    return bench_plan, bench_render, bench_scaling, data_sheets


def test_the_page_equals_the_computed_tables(lib):
    _, render, tables, _ = lib
    page = (ROOT / "docs" / "multi-gpu.md").read_text(encoding="utf-8")
    assert render.replaced(page, "computed", tables.tables()) == page, "run scripts/bench --render"


def test_the_numbers_of_the_tables_follow_from_the_data_sheet(lib):
    _, _, tables, sheets = lib
    decoder = scaling.Decoder.of(known_shapes.SHAPES["llama-70b"].settings)
    read, cached, whole, flops = sheets.MODELS["llama-70b"]
    assert decoder.item * decoder.matrices == pytest.approx(read, rel=1e-3)
    assert decoder.item * decoder.keys == cached and decoder.weights == pytest.approx(whole, rel=1e-3)
    assert 2 * (decoder.matrices - decoder.vocabulary * decoder.hidden) == pytest.approx(flops, rel=1e-3)
    # The time to read 139.01 GB at 5.3 TB/s.
    assert "| Llama-70B | 26.23 ms |" in tables.steps()
    # 4.59 MB = 160 × 16 KiB × 2 × 7 / 8
    assert "160 × 16 KiB" in tables.exchanged() and "4.59 MB" in tables.exchanged()
    assert tables.allowed().splitlines()[-1] == "| Llama-405B | does not fit | does not fit | needed to fit | 38 µs |"


def test_the_segments_can_be_sharded_over_their_ranks(lib):
    plan, _, _, _ = lib
    shared = {name: value for name, value in plan.SEGMENTS.items() if value.tp > 1}
    assert set(shared) == {"tp-2", "tp-4", "tp-2-fp32"}
    for tensor in shared.values():
        settings = known_shapes.SHAPES[tensor.shape].settings
        assert settings["num_key_value_heads"] % tensor.tp == 0 and tensor.layers < settings["num_hidden_layers"]
        assert "hf_rocm" in tensor.sides and "stock" in tensor.sides


def test_a_recorded_run_on_several_gpus_names_the_interconnect(lib):
    _, render, _, _ = lib
    case = Case("decode", 1, 1024, 128)
    info = {"case": case.title, "sums": 33, "message": 16384, "gathered": 0, "sent": 540672.0}
    parallel = {"tp": 2, "world": 2, "backend": "NCCL 2.27.7", "apart": [], "wire": 2e11}
    parallel["exchanges"] = [{**info, "sent_per_token": 540672.0, "sum_microseconds": 12.34}]
    machine = {"device": "NVIDIA H200", "hf_rocm": "0.1.0", "torch": "2.11.0", "transformers": "5.17.0"}
    recorded_run = segment("tp-2", result(case, stock=16.0, hf_rocm=8.0), parallel=parallel, machine=machine)
    text = "\n".join(render.times([recorded_run]))
    assert "| 2 GPUs: decode, batch 1, prompt 1024, 128 new tokens | 4.00 | 16.00 | **8.00** | 2.00 | 2.00 |" in text
    assert "Tensor parallel across 2 ranks, NCCL 2.27.7; all GPUs have peer access to each other" in text
    assert "torch 2.11.0, transformers 5.17.0; commit 0123456789ab." in text
    assert "33 all-reduces of 16.38 kB; each rank sends 541 kB" in text and "12.3 µs" in text
