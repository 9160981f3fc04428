"""Reading tables: tables of every release are read as written, and damaged ones are refused with the line number."""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_rocm.errors import HfRocmError, TableError
from hf_rocm.ops.aiter.tables import table
from hf_rocm.ops.aiter.tables.columns import LAYOUTS, layout_of
from hf_rocm.ops.aiter.tables.merge import YOURS, merge
from tests.tools.tuning.conftest import MI300X, row, table_text, write

RELEASE = "0.1.20"
LAYOUT = layout_of(RELEASE)


def read(path, release=RELEASE):
    return table.read(path, layout_of(release), release)


def problems(path, release=RELEASE):
    return {line: text for line, text in read(path, release).problems}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.since)
def test_a_table_of_every_release_is_read_as_written(layout, tmp_path):
    rows = [row(layout, M=m, bias=bias, libtype=name) for m in (1, 64) for bias in (0, 1) for name in ["torch"]]
    rows = [row.replace(",0,torch.", ",False,torch.").replace(",1,torch.", ",True,torch.") for row in rows]
    text = table_text(layout, *rows)
    table = read(write(tmp_path / "t.csv", text), layout.since)
    assert table.problems == [] and table.columns == layout.tuned
    assert [row.line for row in table.rows] == [2, 3, 4, 5]
    assert [(row.key.m, row.key.bias) for row in table.rows] == [(1, False), (1, True), (64, False), (64, True)]
    assert all(row.us == 7.5 for row in table.rows)
    merged = merge([(YOURS, table)], layout, MI300X)
    assert merged.text == text


def test_byte_order_marks_and_blank_lines_are_accepted(tmp_path):
    text = table_text(LAYOUT, row(LAYOUT, err_ratio="Null", tflops="", kernelName="Null"), "", ",,,")
    text = "\ufeff" + text.replace("tflops,bw", "tflops, bw").replace("\n", "\r\n")
    table = read(write(tmp_path / "t.csv", text))
    assert table.problems == [] and len(table.rows) == 1 and table.columns == LAYOUT.tuned


DAMAGES = [
    ({"M": 0}, "M is '0', not an integer from 1 to 2147483647"),
    ({"N": -4}, "N is '-4', not an integer"),
    ({"K": "5e3"}, "K is '5e3'"),
    ({"K": 2**31}, "K is '2147483648'"),
    ({"M": "1٢"}, "M is '1\\u0662'"),
    ({"M": ""}, "M is empty"),
    ({"bias": "maybe"}, "bias is 'maybe', not True or False"),
    ({"scaleAB": ""}, "scaleAB is empty"),
    ({"bpreshuffle": "0.0"}, "bpreshuffle is '0.0'"),
    ({"dtype": "bf16"}, "dtype is 'bf16', which aiter never looks up; expected, for example, torch.bfloat16"),
    ({"outdtype": "dtypes.bf16"}, "outdtype is 'dtypes.bf16'"),
    ({"libtype": "rocblas"}, "libtype is 'rocblas'; this release supports asm"),
    ({"solidx": "x"}, "solidx is 'x'"),
    ({"splitK": -1}, "splitK is '-1'"),
    ({"us": "fast"}, "us is 'fast', not a number"),
    ({"us": ""}, "us is empty"),
    ({"err_ratio": "0..1"}, "err_ratio is '0..1'"),
    ({"kernelName": "a\x07b"}, "kernelName is not the name of a kernel"),
    ({"cu_num": 0}, "cu_num is '0'"),
    ({"gfx": "MI300X"}, "gfx is 'MI300X', not an architecture such as gfx942"),
]


@pytest.mark.parametrize(("changes", "words"), DAMAGES, ids=lambda value: str(value)[:30])
def test_a_damaged_row_is_refused_with_its_line(changes, words, tmp_path):
    text = table_text(
        LAYOUT, row(LAYOUT), row(LAYOUT, M=16, **changes) if "M" not in changes else row(LAYOUT, **changes)
    )
    table = read(write(tmp_path / "t.csv", text))
    assert [problem.line for problem in table.problems] == [3]
    assert table.problems[0].text.startswith(words)
    assert [row.line for row in table.rows] == [2]
    with pytest.raises(TableError) as refused:
        table.refuse(RELEASE)
    assert refused.value.facts["line 3"].startswith(words)


def test_a_row_with_too_few_or_too_many_fields_is_a_problem(tmp_path):
    whole = row(LAYOUT)
    text = table_text(LAYOUT, whole, whole.rpartition(",")[0], whole + ",1")
    assert problems(write(tmp_path / "t.csv", text)) == {
        3: "expected 18 fields, as in the header, got 17",
        4: "expected 18 fields, as in the header, got 19",
    }


def test_two_different_rows_for_one_shape_are_a_problem(tmp_path):
    text = table_text(LAYOUT, row(LAYOUT), row(LAYOUT, M=9), row(LAYOUT), row(LAYOUT, us=1.0))
    assert problems(write(tmp_path / "t.csv", text)) == {5: "the same shape as line 2, with another kernel or time"}
    by_gfx = table_text(LAYOUT, row(LAYOUT), row(LAYOUT, gfx="gfx90a", us=1.0))
    assert problems(write(tmp_path / "t.csv", by_gfx)) == {}
    # up to 0.1.15, only the number of compute units distinguishes GPUs
    assert problems(write(tmp_path / "t.csv", by_gfx), "0.1.15") == {
        3: "the same shape as line 2, with another kernel or time"
    }


def test_without_a_gfx_column_the_compute_units_determine_the_gpu(tmp_path):
    old = layout_of("0.1.12")
    text = table_text(old, row(old), row(old, cu_num=110), row(old, cu_num=256))
    assert problems(write(tmp_path / "t.csv", text)) == {
        1: "there is no column gfx (`hf-rocm tune merge` fills it in)",
        3: "there is no gfx, and 110 compute units don't determine it",
    }
    table = read(tmp_path / "t.csv")
    assert [(row.key.gfx, row.key.units) for row in table.rows] == [("gfx942", 304), ("gfx950", 256)]
    assert problems(tmp_path / "t.csv", "0.1.15") == {}


@pytest.mark.parametrize(
    ("written_by", "read_by", "line"),
    [
        ("0.1.6.post2", "0.1.12", "missing column: bpreshuffle"),
        ("0.1.7.post3", "0.1.7", "bpreshuffle is a column of later releases"),
        ("0.1.6.post1", "0.1.7", "missing column: us"),
        ("0.1.6", "0.1.20", "missing columns: bpreshuffle, splitK, us, err_ratio"),
    ],
)
def test_a_table_of_another_generation_is_refused_and_named(written_by, read_by, line, tmp_path):
    layout = layout_of(written_by)
    path = write(tmp_path / "t.csv", table_text(layout, row(layout)))
    with pytest.raises(TableError) as refused:
        read(path, read_by)
    assert refused.value.facts["line 1"] == line
    assert f"the columns of amd-aiter >={layout.since}" in refused.value.facts["found"]


def test_a_newer_table_works_with_an_older_release_that_ignores_gfx(tmp_path):
    path = write(tmp_path / "t.csv", table_text(LAYOUT, row(LAYOUT)))
    table = read(path, "0.1.10")
    assert table.problems == [] and table.rows[0].key.gfx == "gfx942" and "gfx" not in table.rows[0].values


def test_an_invalid_header_is_refused(tmp_path):
    with pytest.raises(TableError, match="is empty"):
        read(write(tmp_path / "t.csv", "\n\n"))
    with pytest.raises(TableError) as refused:
        read(write(tmp_path / "t.csv", ",".join([*LAYOUT.tuned, "M"]) + "\n"))
    assert refused.value.facts["line 1"] == "the column 'M' appears twice"


def test_a_tuner_that_found_nothing_leaves_a_row_without_a_time(tmp_path):
    text = table_text(LAYOUT, row(LAYOUT, us=-1), row(LAYOUT, M=9, us="inf"), row(LAYOUT, M=10, us=0))
    assert [row.us for row in read(write(tmp_path / "t.csv", text)).rows] == [None, None, 0.0]


def hostile(tmp_path):
    header = table_text(LAYOUT).encode()
    yield "binary", os.urandom(5000).replace(b"\0", b"\xff"), "is not UTF-8 text"
    yield "NUL", header + b"gfx942\0,304\n", "a NUL byte"
    yield "open quote", header + b'"' + b"a\n" * 100, "not CSV"
    yield "long field", header + b"x" * 200_000 + b"\n", "not CSV"
    yield "wide header", b"a," * 100_000, "100001 columns"
    yield "zip", b"PK\x03\x04\x14\x00" + os.urandom(100), "a NUL byte"
    yield "empty", b"", "is empty"


@pytest.mark.parametrize("number", range(7))
def test_a_malicious_file_is_an_error(number, tmp_path):
    name, data, words = list(hostile(tmp_path))[number]
    path = tmp_path / f"{name}.csv"
    path.write_bytes(data)
    # Measure processor time, because other processes may be running.
    began = time.process_time()
    with pytest.raises(TableError) as refused:
        read(path)
    assert words in str(refused.value) and len(str(refused.value)) < 3000
    assert time.process_time() - began < 5


def test_a_path_that_is_not_a_file_is_an_error(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    for path, words in {
        tmp_path: "is a folder",
        tmp_path / "loop": "symbolic links",
        tmp_path / "gone": "No such file",
        tmp_path / "pipe": "is not a regular file",
        tmp_path / "a\0b": "null byte",
        "/dev/zero": "is not a regular file",
        tmp_path / ("n" * 300): "File name too long",
    }.items():
        with pytest.raises(TableError) as refused:
            read(type(tmp_path)(path))
        assert words in str(refused.value)


def test_the_read_size_is_limited(tmp_path, monkeypatch):
    path = tmp_path / "t.csv"
    path.write_bytes(b"")
    # Make a sparse file of 1 TiB.
    os.truncate(path, 1 << 40)
    with pytest.raises(TableError, match="larger than any table"):
        read(path)
    monkeypatch.setattr(table, "MAX_ROWS", 3)
    with pytest.raises(TableError, match="more than 3 rows"):
        read(write(path, table_text(LAYOUT, *(row(LAYOUT, M=m) for m in range(1, 6)))))


@pytest.mark.parametrize("line", ["x", "x,y", "", ",", ",,,,,,,,,,,,,,,,,,,,"])
def test_the_number_of_wrong_and_empty_rows_is_limited(tmp_path, monkeypatch, line):
    monkeypatch.setattr(table, "MAX_ROWS", 3)
    allowed = table_text(LAYOUT, row(LAYOUT), line, line)
    read(write(tmp_path / "t.csv", allowed))
    with pytest.raises(TableError, match="more than 3 rows"):
        read(write(tmp_path / "t.csv", allowed + f"{line}\n" * 2))


def test_the_number_of_empty_lines_above_the_header_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "MAX_ROWS", 3)
    with pytest.raises(TableError, match="more than 3 rows"):
        read(write(tmp_path / "t.csv", "\n" * 9 + table_text(LAYOUT, row(LAYOUT))))


def test_a_file_with_many_errors_is_summarised(tmp_path):
    loaded = read(write(tmp_path / "t.csv", table_text(LAYOUT, *["x"] * 500)))
    assert len(loaded.problems) == table.MAX_PROBLEMS and loaded.more_problems == 500 - table.MAX_PROBLEMS
    with pytest.raises(TableError) as refused:
        loaded.refuse(RELEASE)
    assert refused.value.facts["and"] == "480 more"


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 40))
def test_random_bytes_result_in_a_table_or_an_error(tmp_path_factory, noise, position, cut):
    """Random bytes at any position of a valid table never crash the reader."""
    whole = table_text(LAYOUT, row(LAYOUT), row(LAYOUT, M=9)).encode()
    path = tmp_path_factory.getbasetemp() / "noise.csv"
    path.write_bytes(whole[:position] + noise + whole[position + cut :])
    try:
        table = read(path)
    except HfRocmError:
        return
    assert all(row.line >= 2 and row.key.m > 0 for row in table.rows)
