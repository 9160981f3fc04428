"""Detecting the release of aiter and the GPU."""

from __future__ import annotations

import pytest

from hf_rocm.errors import OptionError, TuningError
from hf_rocm.ops.aiter.tables import machine
from hf_rocm.ops.aiter.tables.columns import LAYOUTS, NEWEST, layout_of
from hf_rocm.ops.aiter.tables.machine import Gpu
from tests.tools.tuning.conftest import MI300X, table_text, write


@pytest.mark.parametrize("version", [layout.since for layout in LAYOUTS])
def test_the_installed_aiter_is_detected_with_its_tuner_and_tables(version, fake_aiter):
    fake = fake_aiter(version, models={"x_bf16_tuned_gemm.csv": "a\n", "x_bf16_untuned_gemm.csv": "a\n"})
    assert fake.release.layout == layout_of(version)
    assert fake.release.tuner == fake.site / "aiter_meta" / fake.release.layout.tuner
    names = [path.name for path in fake.release.shipped]
    assert names == [fake.release.layout.table, "x_bf16_tuned_gemm.csv"]
    assert machine.release() == machine.release(version) == fake.release
    assert machine.release(NEWEST).folder is None or version == NEWEST


def test_a_build_with_an_unclear_version_is_identified_by_its_columns(fake_aiter):
    fake = fake_aiter("0.1.10")
    newest = LAYOUTS[-1]
    write(fake.site / "aiter/configs/bf16_tuned_gemm.csv", table_text(newest))
    # the two newest layouts have these columns, but the tuner is that of the older one
    assert machine.release().layout == LAYOUTS[-2]
    write(fake.site / "aiter_meta" / newest.tuner, "")
    (fake.site / "aiter_meta" / LAYOUTS[-2].tuner).unlink()
    assert machine.release().layout == newest


def test_unknown_columns_are_refused(fake_aiter):
    fake = fake_aiter("0.1.20")
    write(fake.site / "aiter/configs/bf16_tuned_gemm.csv", "gfx,M,N,K,colour\n")
    with pytest.raises(TuningError, match="columns that hf_rocm does not support"):
        machine.release()


def test_without_aiter_the_newest_release_is_selected(monkeypatch):
    from hf_rocm.overlay.facts import AiterFacts

    for facts in (AiterFacts(), AiterFacts("/site/aiter", amd=False, version="0.13")):
        monkeypatch.setattr(machine, "aiter_facts", lambda facts=facts: facts)
        assert machine.installed() is None
        assert (machine.release().version, machine.release().folder) == (NEWEST, None)
        assert machine.release("0.1.7").layout == layout_of("0.1.7")


def test_the_gpu_is_named_or_given_by_aiters_variables(monkeypatch):
    assert machine.gpu("gfx950:256") == Gpu("gfx950", 256)
    monkeypatch.setenv("GPU_ARCHS", "gfx90a;gfx942")
    monkeypatch.setenv("CU_NUM", "304")
    assert machine.gpu() == MI300X
    monkeypatch.setenv("GPU_ARCHS", "native")
    assert machine.gpu() is None, "there is no AMD GPU here"
    for wrong in ("gfx942", "MI300X", "gfx942:0", "gfx942:x", ":304"):
        with pytest.raises(OptionError, match="is not a GPU"):
            machine.gpu(wrong)
