"""Segments are read back as written and replace older ones of the same name. Errors about other files name the file."""

from __future__ import annotations

import json

import pytest

from hf_rocm.tools.bench import record, report
from hf_rocm.tools.bench.cases import Case
from hf_rocm.tools.bench.record import RecordError
from tests.tools.bench.conftest import result, segment, timing


def test_segments_are_read_as_written(tmp_path):
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


def test_the_schema_is_unchanged():
    """Programs read this schema, so a change requires a new FORMAT."""
    data = segment().to_dict()
    assert set(data) == {
        "name", "machine", "commit", "model", "rates", "rounds", "missing", "results", "kernels", "starts"
    }  # fmt: skip
    (case,) = data["results"]
    assert set(case) == {"case", "floor", "timings", "left_out"}
    assert case["case"] == {"kind": "decode", "batch": 1, "prompt": 1024, "new": 128}
    assert set(case["floor"]) == {"milliseconds", "bytes", "flops", "by"}
    facts = {"side", "unit", "first", "warmup", "peak", "rounds", "parity", "note", "replay"}
    assert set(case["timings"][0]) == facts
    assert case["timings"][0]["unit"] == pytest.approx({"median": 16.0, "low": 14.4, "high": 19.2})
    assert set(case["timings"][0]["parity"]) == {"error", "allowed", "eager"}
    assert record.Segment.from_dict(json.loads(json.dumps(data))) == segment()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 99, "segments": []}', '{"format": 1, "segments": [{"name": "x"}]}']
)
def test_other_files_are_refused_and_unchanged(text, tmp_path):
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(RecordError) as error:
        record.save(file, segment())
    assert "other.json" in str(error.value) and file.read_text() == text
    assert record.load(tmp_path / "none.json") == []


def test_the_time_of_a_recorded_step_is_kept_and_reported(tmp_path):
    timings = timing("stock", 16.0), timing("hf_rocm", 5.0, replay=4.6)
    done = result(Case("decode", 1, 1024, 128))._replace(timings=timings)
    record.save(tmp_path / "runs.json", segment("alone", done))
    (again,) = record.load(tmp_path / "runs.json")
    assert [timing.replay for timing in again.results[0].timings] == [None, 4.6]
    assert report.notes(done) == ["hf_rocm: a recorded step alone takes 4.60 ms, 1.15 × the roofline"]
    data = again.to_dict()
    for side in data["results"][0]["timings"]:
        # Older files lack this measurement.
        del side["replay"]
    assert record.Segment.from_dict(data).results[0].timings[1].replay is None
