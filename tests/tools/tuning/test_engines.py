"""Running aiter's own tuner: its input, the saved results, and the messages if it fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_rocm.errors import TableError, TuningError
from hf_rocm.ops.aiter.tables import store, table
from hf_rocm.ops.aiter.tables.columns import LAYOUTS, layout_of
from hf_rocm.ops.aiter.tables.machine import Gpu, Release
from hf_rocm.tools.tuning import engines, shapes
from hf_rocm.tools.tuning.shapes import Gemm
from tests.tools.tuning.conftest import MI300X, row, table_text, write

BF16 = "torch.bfloat16"
SHAPES = [Gemm(m, 4096, 512, BF16, bias) for m in (1, 8) for bias in (False, True)]


def kept(release):
    return table.read(store.tuned(MI300X, release), release.layout, release.version)


@pytest.mark.parametrize("version", [layout.since for layout in LAYOUTS])
def test_every_generations_tuner_is_run_on_its_own_files(version, fake_aiter, monkeypatch):
    fake = fake_aiter(version)
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", "/somewhere/mine.csv")
    outcome = engines.tune(SHAPES, MI300X, fake.release)
    assert (outcome.tuned, outcome.missing, outcome.code) == (4, [], 0)
    table = kept(fake.release)
    assert table.problems == [] and [row.key._replace(gfx="gfx942") for row in table.rows] == [
        row.key(*MI300X) for row in SHAPES
    ]
    run = outcome.log.parent
    assert shapes.read(run / "untuned.csv") == SHAPES
    assert (run / "untuned.csv").read_text().splitlines()[0] == ",".join(fake.release.layout.untuned)
    text = outcome.log.read_text()
    assert text.startswith("tuning ['--input_file'") and text.splitlines()[0].endswith(" None"), "a table is active"
    assert engines.known(MI300X, fake.release) == {row.key(*MI300X) for row in SHAPES}


def test_the_command_depends_on_whether_the_release_is_installed(fake_aiter):
    fake = fake_aiter("0.1.20")
    line = engines.command(fake.release, "in.csv", "out.csv")
    script = fake.site / "aiter_meta/csrc/gemm_a16w16/gemm_a16w16_tune.py"
    assert line[1:] == [str(script), "--input_file", "in.csv", "--tuned_file", "out.csv", "--batch", "8"]
    uninstalled = engines.command(Release("0.1.10", layout_of("0.1.10")), "in.csv", "out.csv")
    assert uninstalled == [
        "python3",
        "gradlib/gradlib/gemm_tuner.py",
        "--input_file",
        "in.csv",
        "--tuned_file",
        "out.csv",
    ]


def test_later_results_replace_earlier_ones_and_the_rest_is_kept(fake_aiter):
    fake = fake_aiter("0.1.20")
    layout = fake.release.layout
    old = table_text(layout, row(layout, M=1, us=900, kernelName="old"), row(layout, M=77, kernelName="old"))
    write(store.tuned(MI300X, fake.release), old)
    engines.tune(SHAPES[:1], MI300X, fake.release)
    assert [(row.key.m, row.values["kernelName"]) for row in kept(fake.release).rows] == [(1, ""), (77, "old")]


def test_shapes_without_a_result_are_reported(fake_aiter):
    fake = fake_aiter("0.1.20")
    fake.behaviour.write_text("some")
    outcome = engines.tune(SHAPES, MI300X, fake.release)
    assert (outcome.tuned, outcome.missing, outcome.code) == (2, [SHAPES[1], SHAPES[3]], 1)
    assert len(kept(fake.release).rows) == 2


def test_a_failed_tuner_is_an_error_with_its_last_line(fake_aiter):
    fake = fake_aiter("0.1.20")
    fake.behaviour.write_text("fails")
    with pytest.raises(TuningError, match="returned no kernel") as refused:
        engines.tune(SHAPES, MI300X, fake.release)
    assert refused.value.facts["last line"] == "RuntimeError: no GPU"
    assert Path(refused.value.facts["log"]).is_file()
    assert not store.tuned(MI300X, fake.release).exists()


def test_a_tuner_that_retries_forever_is_stopped(fake_aiter):
    fake = fake_aiter("0.1.10")
    fake.behaviour.write_text("retries")
    with pytest.raises(TuningError, match="returned no kernel"):
        engines.tune(SHAPES, MI300X, fake.release)
    assert not (fake.behaviour.parent / "gave-up").exists(), "the tuner retried for a minute and exited by itself"


def test_an_interrupt_keeps_the_results_and_leaves_no_process(fake_aiter):
    fake = fake_aiter("0.1.20")
    fake.behaviour.write_text("hangs")
    seen = []

    def stop(done, total):
        seen.append((done, total))
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engines.tune(SHAPES, MI300X, fake.release, progress=stop)
    assert seen[-1] == (1, 4)
    assert [row.key.m for row in kept(fake.release).rows] == [1]
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    assert not any(str(fake.behaviour.parent).encode() in command for command in commands)


def test_a_release_without_its_tuner_is_refused(fake_aiter):
    fake = fake_aiter("0.1.20")
    assert fake.release.tuner is not None
    fake.release.tuner.unlink()
    with pytest.raises(TuningError, match="installed without its tuner"):
        engines.tune(SHAPES, MI300X, fake.release)


def test_a_damaged_table_is_refused_with_its_line_and_not_overwritten(fake_aiter):
    fake = fake_aiter("0.1.20")
    damaged = table_text(fake.release.layout, "x")
    write(store.tuned(MI300X, fake.release), damaged)
    with pytest.raises(TableError) as refused:
        engines.tune(SHAPES, MI300X, fake.release)
    assert "line 2" in refused.value.facts
    assert store.tuned(MI300X, fake.release).read_text() == damaged


def test_only_gemms_that_aiter_supports_are_passed_to_its_tuner():
    assert engines.supports(SHAPES[0]) and engines.supports(SHAPES[0]._replace(dtype="torch.float16"))
    assert not engines.supports(SHAPES[0]._replace(dtype="torch.float32"))
    assert not engines.supports(SHAPES[0]._replace(k=36))


def test_tables_are_stored_by_gpu_and_release():
    layout = layout_of("0.1.20")
    places = {
        store.tuned(gpu, Release(version, layout))
        for gpu in (MI300X, Gpu("gfx942", 80), Gpu("gfx950", 256))
        for version in ("0.1.19", "0.1.20")
    }
    assert len(places) == 6
