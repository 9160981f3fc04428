"""The tables that are set for aiter before it is imported."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest

from hf_rocm import options
from hf_rocm.errors import TableError, TuningError
from hf_rocm.ops.aiter.tables import active, machine, store, table
from hf_rocm.ops.aiter.tables.columns import layout_of
from tests.tools.tuning.conftest import MI300X, row, table_text, write

VARIABLE = "AITER_CONFIG_GEMM_BF16"
LAYOUT = layout_of("0.1.20")


def rows_of(path, release="0.1.20"):
    loaded = table.read(path, layout_of(release), release)
    assert loaded.problems == []
    return [(row.key.m, row.values["kernelName"]) for row in loaded.rows]


def table_path():
    from pathlib import Path

    return Path(os.environ[VARIABLE])


def test_without_user_rows_aiters_configuration_is_unchanged(fake_aiter, own_cache):
    fake_aiter("0.1.20", row(LAYOUT))
    active.before_import()
    assert VARIABLE not in os.environ and not own_cache.exists()


def test_the_users_rows_precede_tuned_rows_and_shipped_rows(fake_aiter, tmp_path, monkeypatch):
    fake = fake_aiter(
        "0.1.20",
        row(LAYOUT, M=8, kernelName="shipped"),
        row(LAYOUT, M=3, kernelName="shipped"),
        models={
            "llama_bf16_tuned_gemm.csv": table_text(LAYOUT, row(LAYOUT, M=4, kernelName="model")),
            "llama_bf16_untuned_gemm.csv": "not read",
            "llama_bf16_tuned_batched_gemm.csv": "not read",
        },
    )
    one = write(tmp_path / "one.csv", table_text(LAYOUT, row(LAYOUT, M=8, kernelName="one")))
    two = write(tmp_path / "two.csv", table_text(LAYOUT, row(LAYOUT, M=8, us=0.1), row(LAYOUT, M=2, kernelName="two")))
    write(store.tuned(MI300X, fake.release), table_text(LAYOUT, row(LAYOUT, M=2), row(LAYOUT, M=3, kernelName="here")))
    before = {path: path.read_bytes() for path in (one, two)}
    monkeypatch.setenv(VARIABLE, f"{one}{os.pathsep}{two}")
    active.before_import()
    assert table_path().is_relative_to(store.folder(MI300X, fake.release))
    assert rows_of(table_path()) == [(8, "one"), (2, "two"), (3, "here"), (4, "model")]
    assert {path: path.read_bytes() for path in before} == before
    assert options.tuned_files() == [one, two]
    stamp = table_path().stat().st_mtime_ns
    active.before_import()
    assert table_path().stat().st_mtime_ns == stamp, "the file was written again"
    options.use_tuned_table(None)
    assert os.environ[VARIABLE] == f"{one}{os.pathsep}{two}"


def test_tuned_rows_alone_are_set_as_the_table(fake_aiter):
    fake = fake_aiter("0.1.20")
    write(store.tuned(MI300X, fake.release), table_text(LAYOUT, row(LAYOUT, M=3, kernelName="here")))
    active.before_import()
    assert rows_of(table_path()) == [(3, "here")]
    options.use_tuned_table(None)
    assert VARIABLE not in os.environ


def test_a_child_process_uses_its_parents_merged_table(fake_aiter, monkeypatch):
    fake = fake_aiter("0.1.20", row(LAYOUT, M=99))
    write(store.tuned(MI300X, fake.release), table_text(LAYOUT, row(LAYOUT, M=3)))
    active.before_import()
    inherited = table_path()
    write(store.tuned(MI300X, fake.release), table_text(LAYOUT, row(LAYOUT, M=4)))
    with monkeypatch.context() as child:
        # Simulate a new process that inherits the environment.
        child.setattr(options, "_users_tables", None)
        active.before_import()
    assert table_path() == inherited


def test_a_release_with_unknown_columns_is_imported_unchanged(fake_aiter, monkeypatch):
    """An error here would make the user's first call to an operation fail."""
    fake = fake_aiter("0.1.20")
    shipped = fake.release.shipped[0]
    shipped.write_text("a,b,c\n1,2,3\n", encoding="utf-8")
    with pytest.raises(TuningError):
        machine.installed()
    active.before_import()
    assert VARIABLE not in os.environ


def test_a_damaged_file_of_the_user_is_an_error_that_names_the_line(fake_aiter, tmp_path, monkeypatch):
    fake_aiter("0.1.20")
    actual = write(tmp_path / "mine.csv", table_text(LAYOUT, row(LAYOUT), row(LAYOUT, N="x")))
    monkeypatch.setenv(VARIABLE, str(actual))
    with pytest.raises(TableError) as refused:
        active.before_import()
    assert refused.value.facts["line 3"].startswith("N is 'x'")
    assert os.environ[VARIABLE] == str(actual)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone.csv"))
    with pytest.raises(TableError, match=r"gone\.csv can't be read"):
        active.before_import()


def test_a_damaged_file_of_hf_rocm_or_aiter_is_a_warning(fake_aiter, tmp_path, monkeypatch):
    fake = fake_aiter("0.1.20", row(LAYOUT, M=7, kernelName="good"), row(LAYOUT, M="x"))
    write(store.tuned(MI300X, fake.release), "nonsense\n")
    monkeypatch.setenv(VARIABLE, str(write(tmp_path / "mine.csv", table_text(LAYOUT, row(LAYOUT, kernelName="mine")))))
    with pytest.warns(RuntimeWarning) as warned:
        active.before_import()
    assert len(warned) == 2 and "a table of tuned GEMMs is ignored" in str(warned[0].message)
    assert "line 3: M is 'x'" in str(warned[1].message)
    assert rows_of(table_path()) == [(8, "mine"), (7, "good")]


def test_a_missing_gfx_column_in_the_users_table_is_filled_in(fake_aiter, tmp_path, monkeypatch):
    fake_aiter("0.1.20")
    old = layout_of("0.1.12")
    monkeypatch.setenv(VARIABLE, str(write(tmp_path / "mine.csv", table_text(old, row(old, kernelName="mine")))))
    active.before_import()
    assert rows_of(table_path()) == [(8, "mine")]


def test_a_cache_that_cannot_be_written_is_a_warning(fake_aiter, tmp_path, monkeypatch):
    fake_aiter("0.1.20")
    actual = write(tmp_path / "mine.csv", table_text(LAYOUT, row(LAYOUT)))
    monkeypatch.setenv(VARIABLE, str(actual))
    monkeypatch.setenv("HF_ROCM_CACHE", str(write(tmp_path / "a file", "")))
    with pytest.warns(RuntimeWarning, match="can't be written"):
        active.before_import()
    assert os.environ[VARIABLE] == str(actual)


@pytest.mark.parametrize("release", ["0.1.6", "0.1.20"])
def test_nothing_is_done_if_aiter_is_imported_or_ignores_the_variable(release, fake_aiter, tmp_path, monkeypatch):
    layout = layout_of(release)
    fake_aiter(release)
    monkeypatch.setenv(VARIABLE, str(write(tmp_path / "mine.csv", table_text(layout, row(layout)))))
    if release == "0.1.20":
        monkeypatch.setitem(sys.modules, "aiter", ModuleType("aiter"))
    active.before_import()
    assert table_path() == tmp_path / "mine.csv"


@pytest.mark.parametrize("release", ["0.1.6.post1", "0.1.7.post2", "0.1.10", "0.1.13", "0.1.16"])
def test_every_generation_gets_its_own_columns(release, fake_aiter, tmp_path, monkeypatch):
    layout = layout_of(release)
    fake_aiter(release, row(layout, M=1, kernelName="shipped"))
    actual = write(tmp_path / "mine.csv", table_text(layout, row(layout, kernelName="mine")))
    monkeypatch.setenv(VARIABLE, str(actual))
    active.before_import()
    assert rows_of(table_path(), release) == [(8, "mine"), (1, "shipped")]


def test_a_failed_import_of_aiter_restores_the_variable(fake_aiter, tmp_path, monkeypatch):
    from hf_rocm.ops.aiter import detect

    fake_aiter("0.1.20")
    monkeypatch.setenv(VARIABLE, str(write(tmp_path / "mine.csv", table_text(LAYOUT, row(LAYOUT)))))
    seen = []
    monkeypatch.setattr(detect.importlib, "import_module", lambda name: seen.append(table_path()) or 1 / 0)
    assert "can't be imported here: ZeroDivisionError" in detect.load.__wrapped__()
    assert seen[0].name.startswith("merged-"), "aiter was imported without the merged table"
    assert table_path() == tmp_path / "mine.csv"
