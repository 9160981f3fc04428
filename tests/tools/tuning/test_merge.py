"""Merging tables: the precedence of rows, omitted rows, and aiter's lookups in the result."""

from __future__ import annotations

import pytest

from hf_rocm.ops.aiter.tables import merge as module
from hf_rocm.ops.aiter.tables import table
from hf_rocm.ops.aiter.tables.columns import LAYOUTS, layout_of
from hf_rocm.ops.aiter.tables.merge import SHIPPED, TUNED, YOURS, merge, padded, tuned_of
from hf_rocm.tools.tuning.shapes import Gemm
from tests.tools.tuning.conftest import MI300X, row, table_text, write

LAYOUT = layout_of("0.1.20")


@pytest.fixture
def read(tmp_path):
    def read_rows(*rows, layout=LAYOUT, to=LAYOUT, release="0.1.20"):
        path = write(tmp_path / f"{len(list(tmp_path.iterdir()))}.csv", table_text(layout, *rows))
        return table.read(path, to, release)

    return read_rows


def kernels(merged):
    return [row.values["kernelName"] for row in merged.rows.values()]


def test_the_users_rows_have_precedence_then_the_fastest_shipped_row(read):
    actual = read(row(LAYOUT, kernelName="mine", us=99))
    tuned = read(row(LAYOUT, kernelName="here", us=50), row(LAYOUT, M=16, kernelName="here16"))
    general = read(row(LAYOUT, us=1), row(LAYOUT, M=32, us=9, kernelName="slow"), row(LAYOUT, M=16))
    model = read(row(LAYOUT, M=32, us=3, kernelName="fast"))
    merged = merge([(YOURS, actual), (TUNED, tuned), (SHIPPED, general), (SHIPPED, model)], LAYOUT, MI300X)
    assert kernels(merged) == ["mine", "here16", "fast"]
    assert [(share.role, share.taken, share.repeated) for share in merged.shares] == [
        (YOURS, 1, 0),
        (TUNED, 1, 1),
        (SHIPPED, 0, 3),
        (SHIPPED, 1, 0),
    ]


def test_rows_of_other_gpus_and_of_failed_tuning_are_omitted(read):
    one = read(
        row(LAYOUT, M=1),
        row(LAYOUT, M=2, cu_num=80),
        row(LAYOUT, M=3, gfx="gfx90a"),
        row(LAYOUT, M=4, us=-1),
    )
    merged = merge([(YOURS, one)], LAYOUT, MI300X)
    assert [key.m for key in merged.rows] == [1]
    (share,) = merged.shares
    assert (share.taken, share.elsewhere, share.failed) == (1, 2, 1)
    assert [key.m for key in merge([(YOURS, one)], LAYOUT, None).rows] == [1, 2, 3]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.since)
def test_the_merged_table_is_valid_and_has_the_same_rows(layout, read, tmp_path):
    one = read(row(layout, M=1), row(layout, M=2, libtype="torch"), layout=layout, to=layout, release=layout.since)
    merged = merge([(YOURS, one)], layout, MI300X)
    back = table.read(write(tmp_path / "merged.csv", merged.text), layout, layout.since)
    assert back.problems == [] and back.columns == layout.tuned
    again = merge([(YOURS, back)], layout, MI300X)
    assert again.text == merged.text and again.digest == merged.digest


def test_a_missing_gfx_is_filled_in_and_flags_are_normalised(read):
    old = layout_of("0.1.12")
    one = read(row(old, bias="TRUE", scaleAB="false"), layout=old)
    (line,) = merge([(YOURS, one)], LAYOUT, MI300X).text.splitlines()[1:]
    assert line.startswith("gfx942,304,8,4096,512,True,torch.bfloat16,torch.bfloat16,False,False,asm")


def test_m_is_padded_as_in_aiter():
    assert {m: padded(m, 4096) for m in (1, 16, 17, 257, 1025, 4097)} == {
        1: (16, 1),
        16: (16, 16),
        17: (32, 32),
        257: (288, 512),
        1025: (1088, 2048),
        4097: (4224, 8192),
    }
    assert padded(9000, 4096) == (9088, 16384) and padded(9000, 4097) == (9088, 8192)


def test_gemms_are_counted_as_tuned_if_aiter_finds_a_row(read):
    merged = merge([(YOURS, read(row(LAYOUT, M=16), row(LAYOUT, M=64, bias=True)))], LAYOUT, MI300X)
    shapes = [
        Gemm(16, 4096, 512, "torch.bfloat16", False),
        # aiter pads 9 rows to 16.
        Gemm(9, 4096, 512, "torch.bfloat16", False),
        # aiter pads 33 rows to 64, the next power of two.
        Gemm(33, 4096, 512, "torch.bfloat16", True),
        Gemm(33, 4096, 512, "torch.bfloat16", False),
        Gemm(16, 4096, 512, "torch.float16", False),
        Gemm(16, 4096, 512, "torch.bfloat16", False, shuffled=True),
    ]
    gemms = [tuned_of(merged, [shape.key(*MI300X)]) for shape in shapes]
    assert gemms == [1, 1, 1, 0, 0, 0]
    assert module.tuned_of(merged, [shape.key("gfx950", 256) for shape in shapes]) == 0
