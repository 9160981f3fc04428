"""scripts/bench: its segments can be measured, and the tables in docs/performance.md match the recorded segments."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from hf_rocm.tools.bench import record
from hf_rocm.tools.bench.cases import KINDS, Case
from hf_rocm.tools.bench.known_shapes import SHAPES
from hf_rocm.tools.bench.variants import EARLIER_NOT_DECODING, LABELS, NOT_DECODING
from tests.tools.bench.conftest import result, segment, timing

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lib(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from lib import bench_plan, bench_render, data_sheets

    return bench_plan, bench_render, data_sheets


def test_every_segment_names_existing_shapes_and_sides(lib):
    plan, render, _ = lib
    for name, value in plan.SEGMENTS.items():
        assert value.shape in SHAPES and set(value.sides) <= set(LABELS) and value.rounds > 0
        assert value.cases or value.run == "kernels", name
        assert value.dtype is None or getattr(torch, value.dtype).is_floating_point
        assert all(Case(*case).kind in KINDS for case in value.cases)
    shown = {name for names in render.TABLES.values() for name in names} | {"start", "kernels"}
    assert shown == set(plan.SEGMENTS)


def test_a_segment_is_measured_once_and_kept(lib, tmp_path, monkeypatch, capsys):
    plan, _, _ = lib
    tiny = plan.Plan("small", (("prefill", 1, 8, 0),), rounds=1, layers=1)
    monkeypatch.setattr(plan, "SEGMENTS", {"tiny": tiny})
    file = tmp_path / "runs.json"
    main = runpy.run_path(str(ROOT / "scripts" / "bench"))["main"]
    requested = ["bench", "--segment", "all", "--device", "cpu", "--output", str(file), "--commit", "0123456789ab"]
    monkeypatch.setattr("sys.argv", requested)
    assert main() == 0
    (measured,) = record.load(file)
    assert (measured.name, measured.commit) == ("tiny", "0123456789ab")
    assert [timing.side for timing in measured.results[0].timings] == ["stock", "hf_rocm"]
    before = file.read_bytes()
    monkeypatch.setattr("sys.argv", [*requested, "--resume"])
    assert main() == 0 and file.read_bytes() == before
    assert "tiny: already recorded" in capsys.readouterr().err


def test_the_tables_show_the_segments(lib, tmp_path):
    _, render, _ = lib
    (tmp_path / "docs" / "performance").mkdir(parents=True)
    page = tmp_path / "docs" / "performance.md"
    page.write_text((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"), encoding="utf-8")
    file = tmp_path / "docs" / "performance" / "gpu.json"
    alone = result(Case("decode", 1, 512, 64), stock=16.0)
    alone = alone._replace(timings=(*alone.timings, timing("hf_rocm", 5.0, replay=4.6)))
    start = {"side": "hf_rocm", "warmup": 4.25, "peak": 17e9, "reserved": 18e9, "weights": 16e9, "static_cache": 151e6}
    record.write(
        file,
        [
            segment("decode-1"),
            segment("qwen3-8b", alone),
            segment("prefill", result(Case("prefill", 1, 1024), floor=20.0, stock=32.4, hf_rocm=25.0)),
            segment("start", starts=({**start, "caches": "cold"}, {**start, "caches": "cached", "warmup": 0.5})),
            segment("kernels", kernels=(kernel("torch: F.rms_norm", 40.0), kernel("triton: rms_norm", 32.0))),
        ],
    )
    files = render.render(tmp_path)
    assert {file.name for file in files} >= {"performance.md", "decode.svg"}
    text = page.read_text(encoding="utf-8")
    assert (
        "| decode, batch 1, prompt 1024, 128 new tokens | 4.00 | 16.00 | 8.00 | 7.00 | **5.00** | 1.25 | 3.20 | 1.40 |"
        in text
    )
    assert "| × roofline | × stock | recorded step alone, × roofline |" in text
    assert "| decode, batch 1, prompt 512, 64 new tokens | 4.00 | 16.00 | **5.00** | 1.25 | 3.20 | 1.15 |" in text
    assert "| prefill, 1 × 1024 tokens | 20.0 | 32.4 | **25.0** | 1.25 | 1.30 |" in text
    assert "| **hf_rocm** | 4.2 | 0.5 | 17.00 | 18.00 |" in text
    assert "| rms_norm: 4096 × 8192 | 31.6 |  | 32.0 | 40.0 | triton: rms_norm, 99 % |" in text
    assert "Forced: not an AMD GPU" in text and "0123456789ab" in text
    assert render.render(tmp_path) and page.read_text(encoding="utf-8") == text


def kernel(implementation, microseconds):
    return {
        "operation": "rms_norm",
        "case": "4096 × 8192",
        "implementation": implementation,
        "microseconds": microseconds,
        "floor": 31.6,
        "share": 31.6 / microseconds,
        "bound": "memory",
        "reason": None,
    }


def test_sides_that_differ_only_in_decoding_are_not_listed_as_left_out(lib):
    _, render, _ = lib
    left_out = dict(
        zip(("compile", "reduce-overhead", "no-graphs"), (NOT_DECODING, *EARLIER_NOT_DECODING), strict=True)
    )
    case = result(Case("prefill", 1, 1024))._replace(left_out={**left_out, "liger": "it needs more memory"})
    lines = [line for line in render.times([segment("prefill", case)]) if "was left out" in line]
    assert lines == ["- prefill, 1 × 1024 tokens: liger was left out: it needs more memory."]


def test_the_page_equals_the_rendered_segments(lib, tmp_path):
    """Fails if the tables on the page were edited by hand."""
    _, render, _ = lib
    docs = tmp_path / "docs"
    (docs / "performance").mkdir(parents=True)
    for path in (ROOT / "docs" / "performance").glob("*.json"):
        (docs / "performance" / path.name).write_bytes(path.read_bytes())
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    (docs / "performance.md").write_text(text, encoding="utf-8")
    render.render(tmp_path)
    assert (docs / "performance.md").read_text(encoding="utf-8") == text


def test_the_computed_table_follows_from_the_shapes(lib):
    """The table lists the bytes and operations of the named shapes, which follow from their configs."""
    _, _, sheets = lib
    for name, (read, cached, whole, flops) in sheets.MODELS.items():
        shape = SHAPES[name].settings
        hidden, width = shape["hidden_size"], 128 * shape["num_key_value_heads"]
        layer = 2 * hidden * hidden + 2 * hidden * width + 3 * hidden * shape["intermediate_size"]
        layers, head = shape["num_hidden_layers"] * layer, shape["vocab_size"] * hidden
        assert read == pytest.approx(2 * (layers + head), rel=1e-3)
        assert whole == pytest.approx(2 * (layers + 2 * head), rel=1e-3)
        assert flops == pytest.approx(2 * layers, rel=1e-3)
        assert cached == 2 * 2 * width * shape["num_hidden_layers"]
    text = sheets.table()
    assert re.search(r"MI300X \(gfx942\) .* 2\.83 ms \(353 tokens/s\)", text)
    fits = {line.split("|")[1].strip(): 4 - line.count("does not fit") for line in text.splitlines()[2:]}
    assert fits["MI300X (gfx942)"] == 4 and fits["RX 7900 XTX (gfx1100)"] == fits["Ryzen AI Max+ 395 (gfx1151)"] == 3
    # The weights of the smallest model take 16.06 GB.
    assert fits["RX 9060 XT (gfx1200)"] == 0
    assert "| 59 TFLOP/s (computed) |" in text and "| 1307 TFLOP/s |" in text
