"""Segments survive their file, replace their old selves, and files that aren't ours are refused by name."""

from __future__ import annotations

import json

import pytest

from hf_rocm.bench import record
from hf_rocm.bench.cases import Case
from hf_rocm.bench.record import RecordError
from tests.bench.conftest import result, segment


def test_what_is_written_is_read_again(tmp_path):
    file = tmp_path / "deep" / "runs.json"
    first = segment("decode-1")
    second = segment("kernels", kernels=({"operation": "rope", "microseconds": 1.5, "reason": None},))
    record.save(file, first)
    record.save(file, second)
    assert record.load(file) == [first, second]
    again = segment("decode-1", result(Case("decode", 8, 1024, 128), stock=15.0, hf_rocm=6.0))
    record.save(file, again)
    assert record.load(file) == [second, again]
    assert list(tmp_path.rglob("*")) == [file.parent, file]


def test_the_schema():
    """What programs read; a change of it needs another FORMAT."""
    data = segment().to_dict()
    assert set(data) == {
        "name", "machine", "commit", "model", "rates", "rounds", "missing", "results", "kernels", "starts"
    }  # fmt: skip
    (case,) = data["results"]
    assert set(case) == {"case", "floor", "timings", "left_out"}
    assert case["case"] == {"kind": "decode", "batch": 1, "prompt": 1024, "new": 128}
    assert set(case["floor"]) == {"milliseconds", "bytes", "flops", "by"}
    assert set(case["timings"][0]) == {"side", "unit", "first", "warmup", "peak", "rounds", "parity", "note"}
    assert case["timings"][0]["unit"] == pytest.approx({"median": 16.0, "low": 14.4, "high": 19.2})
    assert set(case["timings"][0]["parity"]) == {"error", "allowed", "eager"}
    assert record.Segment.from_dict(json.loads(json.dumps(data))) == segment()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 99, "segments": []}', '{"format": 1, "segments": [{"name": "x"}]}']
)
def test_other_files_are_refused_and_left_alone(text, tmp_path):
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(RecordError) as error:
        record.save(file, segment())
    assert "other.json" in str(error.value) and file.read_text() == text
    assert record.load(tmp_path / "none.json") == []
