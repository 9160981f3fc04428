"""Models that the installed transformers does not have, or that no overlay supports in its release."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_rocm.check_version import main as check_version
from hf_rocm.cli import main
from hf_rocm.errors import OverlayError
from hf_rocm.overlay import catalog as catalogs
from hf_rocm.overlay import manifest
from hf_rocm.overlay.activate import activate, deactivate
from hf_rocm.overlay.catalog import Catalog
from hf_rocm.overlay.commands import install, status, uninstall
from hf_rocm.overlay.manifest import Limit, Manifest
from hf_rocm.overlay.scan import left_out, survey
from hf_rocm.overlay.state import Installed, Match
from tests.overlay.conftest import MODELS, Site, fingerprint

REASON = "its attention has a different form there"
UseCatalog = Callable[..., Catalog]


@pytest.fixture
def use_catalog(tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> UseCatalog:
    """Returns a function that makes all commands use a test catalog: the overlays of MODELS and optionally one more."""

    def make(*, newcomer: str = "", releases: tuple[str, ...] = (), limits: dict[str, Limit] | None = None) -> Catalog:
        root = tmp_path / "overlays"
        for directory in catalog.directories:
            files = {model: path for model, path in directory.files.items() if model in MODELS}
            records = {model: record for model, record in directory.manifest.records.items() if model in MODELS}
            if newcomer and directory is catalog.serving("llama", "5.23.0"):
                record = directory.manifest.records["llama"]
                seen = {sha: releases for sha in list(record.files)[:1]}
                records[newcomer] = manifest.Record(seen, {})
                files[newcomer] = directory.files["llama"]
            for model, path in files.items():
                target = root / directory.name / "models" / model / f"modeling_{model}.py"
                target.parent.mkdir(parents=True)
                target.write_bytes(path.read_bytes())
            own = {model: limit for model, limit in (limits or {}).items() if model in files}
            text = manifest.render(Manifest(directory.manifest.transformers, records, own))
            (root / directory.name).mkdir(exist_ok=True)
            (root / directory.name / "manifest.toml").write_text(text)
        test_catalog = Catalog(root)
        monkeypatch.setattr(catalogs, "load", lambda *_, **__: test_catalog)
        monkeypatch.setattr("hf_rocm.check_version.load", lambda: test_catalog)
        return test_catalog

    return make


def test_a_model_that_transformers_does_not_have_is_skipped(site: Site, use_catalog: UseCatalog) -> None:
    catalog = use_catalog(newcomer="gemma9", releases=("5.90.0", "5.91.0"))
    assert "gemma9" in catalog.models()
    assert [state.model for state in survey(site.installation, catalog)] == list(MODELS)
    assert left_out(site.installation, catalog).absent == ("gemma9",)
    plan, _ = install(transformers_path=site.path)
    assert [action.model for action in plan.writes] == list(MODELS) and plan.refusals == ()
    assert status(transformers_path=site.path).left_out.absent == ("gemma9",)
    plan, _ = uninstall(transformers_path=site.path)
    assert [action.model for action in plan.writes] == list(MODELS)


@pytest.mark.parametrize("command", [install, uninstall, status])
def test_naming_an_absent_model_raises_an_error_with_the_releases_that_have_it(
    site: Site, use_catalog: UseCatalog, command: Callable[..., object]
) -> None:
    use_catalog(newcomer="gemma9", releases=("5.90.0", "5.91.0"))
    before = fingerprint(site.path)
    with pytest.raises(OverlayError) as refused:
        command(["gemma9"], transformers_path=site.path)
    assert refused.value.message == f"transformers {site.installation.version} has no model gemma9"
    assert refused.value.facts["expected"] == "a release that has it: 5.90.0–5.91.0"
    assert "install one of those releases" in (refused.value.hint or "")
    assert fingerprint(site.path) == before


def test_activate_skips_an_absent_model(site: Site, use_catalog: UseCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    use_catalog(newcomer="gemma9", releases=("5.90.0",))
    monkeypatch.setenv("HF_ROCM_FORCE", "1")
    monkeypatch.setattr("hf_rocm.overlay.activate.locate", lambda: site.installation)
    try:
        assert activate() == list(MODELS)
        with pytest.raises(OverlayError, match="has no model gemma9"):
            activate("gemma9")
    finally:
        deactivate()


def test_a_removed_file_is_reported_as_missing(site: Site, use_catalog: UseCatalog) -> None:
    catalog = use_catalog()
    site.model("llama").unlink()
    (state,) = survey(site.installation, catalog, ["llama"])
    assert (state.installed, state.match) == (Installed.NO, Match.CHANGED)
    assert left_out(site.installation, catalog).absent == ()
    site.forget_record()
    assert left_out(site.installation, catalog).absent == (), "its folder still exists"
    for file in site.model("llama").parent.iterdir():
        file.unlink()
    site.model("llama").parent.rmdir()
    assert left_out(site.installation, catalog).absent == ("llama",)


def test_an_unsupported_version_of_a_model_stays_stock_with_the_reason(
    site: Site, use_catalog: UseCatalog, capsys: pytest.CaptureFixture[str]
) -> None:
    catalog = use_catalog(limits={"gemma": Limit("<4", REASON)})
    assert left_out(site.installation, catalog).stock == {"gemma": REASON}
    plan, _ = install(transformers_path=site.path)
    assert [action.model for action in plan.writes] == ["bert", "llama", "qwen3"]
    with pytest.raises(OverlayError, match="no overlay of gemma for") as refused:
        install(["gemma"], transformers_path=site.path)
    assert refused.value.facts["because"] == REASON
    path_option = ["--transformers-path", str(site.path)]
    assert main(["status", *path_option]) == check_version(path_option) == 0
    assert capsys.readouterr().out.count(f"gemma stays stock: {REASON}") == 2
    assert main(["status", "--json", *path_option]) == check_version(["--json", *path_option]) == 0
    shown = capsys.readouterr().out
    assert shown.count('"left_out"') == 2 and shown.count(REASON) == 2


def test_a_leftover_block_of_an_unsupported_model_is_reported(site: Site, use_catalog: UseCatalog) -> None:
    install(["gemma"], transformers_path=site.path)
    catalog = use_catalog(limits={"gemma": Limit("<4", REASON)})
    (state,) = survey(site.installation, catalog, ["gemma"])
    assert (state.installed, state.match) == (Installed.OLD, Match.UNSUPPORTED)
    plan, _ = uninstall(transformers_path=site.path)
    assert [action.model for action in plan.writes] == ["gemma"]


def test_commands_report_absent_models_in_one_line(
    site: Site, use_catalog: UseCatalog, capsys: pytest.CaptureFixture[str]
) -> None:
    use_catalog(newcomer="gemma9", releases=("5.90.0",))
    release = site.installation.version
    line = f"1 model with an overlay is not in transformers {release}"
    path_option = ["--transformers-path", str(site.path)]
    assert main(["install-overlays", *path_option]) == main(["status", *path_option]) == check_version(path_option) == 0
    assert capsys.readouterr().out.count(line) == 3
    assert main(["install-overlays", "--json", *path_option]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == {"absent": ["gemma9"], "stock": {}}
