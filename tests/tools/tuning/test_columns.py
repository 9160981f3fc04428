"""The columns of every aiter release, compared with the headers of its files."""

from __future__ import annotations

import pytest

from hf_rocm.errors import TuningError
from hf_rocm.ops.aiter.tables import columns

A = "M,N,K,bias,dtype,outdtype,scaleAB,cu_num,libtype,solidx,soltimes,kernelName,tflops,bw"
B = "M,N,K,bias,dtype,outdtype,scaleAB,cu_num,libtype,solidx,splitK,soltimes,kernelName,err_ratio,tflops,bw"
C = "M,N,K,bias,dtype,outdtype,scaleAB,cu_num,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"
D = "cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"
E = f"gfx,{D}"
PLAIN, SHUFFLED = "M,N,K,bias,dtype,outdtype,scaleAB", "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle"

# release → (columns of tuned files, columns of untuned files, the shipped file, whether rows are looked up by gfx)
RECORDED = {
    **dict.fromkeys(("0.1.5.post2", "0.1.5.post4", "0.1.6"), (A, PLAIN, "tuned_gemm.csv", False)),
    "0.1.6.post1": (B, PLAIN, "tuned_gemm.csv", False),
    **dict.fromkeys(
        ("0.1.6.post2", "0.1.6.post3", "0.1.7", "0.1.7.post1", "0.1.7.post2", "0.1.7.post2.dev18"),
        (C, PLAIN, "bf16_tuned_gemm.csv", False),
    ),
    **dict.fromkeys(
        (
            *("0.1.7.post3", "0.1.7.post5", "0.1.8", "0.1.9", "0.1.9.post1", "0.1.10", "0.1.10.post3"),
            *("0.1.11", "0.1.11.post1", "0.1.12", "0.1.12.post1"),
        ),
        (D, SHUFFLED, "bf16_tuned_gemm.csv", False),
    ),
    **dict.fromkeys(
        (
            *("0.1.12.post2", "0.1.13.dev0", "0.1.13rc5", "0.1.13", "0.1.13.post1"),
            *("0.1.14", "0.1.14.post1", "0.1.15", "0.1.15.post3"),
        ),
        (E, SHUFFLED, "bf16_tuned_gemm.csv", False),
    ),
    **dict.fromkeys(
        ("0.1.16", "0.1.16.post6", "0.1.17", "0.1.18", "0.1.19", "0.1.19.post2", "0.1.20", "0.1.20.post1", "0.2.0"),
        (E, SHUFFLED, "bf16_tuned_gemm.csv", True),
    ),
}


@pytest.mark.parametrize("release", RECORDED)
def test_a_release_has_the_columns_of_its_own_files(release):
    tuned, untuned, table, by_gfx = RECORDED[release]
    layout = columns.layout_of(release)
    assert ",".join(layout.tuned) == tuned
    assert ",".join(layout.untuned) == untuned
    assert layout.table == table
    assert ("gfx" in layout.key) is by_gfx
    assert layout.tuner.endswith("gemm_a16w16_tune.py" if by_gfx else "gemm_tuner.py")
    assert layout in columns.layouts_with(tuple(tuned.split(",")))


def test_keys_consist_of_columns_of_the_rows():
    for layout in columns.LAYOUTS:
        assert set(layout.key) <= set(layout.tuned) and set(layout.untuned) <= set(layout.key)


def test_the_libraries_depend_on_the_release():
    assert "rocblas" in columns.libraries("0.1.6") and "rocblas" not in columns.libraries("0.1.7")
    assert "flydsl" not in columns.libraries("0.1.11.post1") and "flydsl" in columns.libraries("0.1.12")
    assert "opus" not in columns.libraries("0.1.14.post1") and "opus" in columns.libraries("0.1.15")


def test_the_releases_with_given_columns_are_named():
    releases = {columns.releases_of(columns.layouts_with(layout.tuned)) for layout in columns.LAYOUTS}
    assert releases == {
        ">=0.1.5.post2,<0.1.6.post1",
        ">=0.1.6.post1,<0.1.6.post2",
        ">=0.1.6.post2,<0.1.7.post3",
        ">=0.1.7.post3,<0.1.12.post2",
        ">=0.1.12.post2",
    }


@pytest.mark.parametrize("release", ["0.1.4", "0.1.5"])
def test_older_releases_are_refused(release):
    with pytest.raises(TuningError, match="does not support the tables"):
        columns.layout_of(release)


def test_an_invalid_release_is_refused():
    with pytest.raises(TuningError, match="is not a release"):
        columns.layout_of("the newest")
