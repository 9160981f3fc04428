"""With a release newer than the tested ones, only models whose definitions changed are refused and reported."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_rocm import check_version
from hf_rocm.cli import main, output
from hf_rocm.errors import DigestMismatch, OverlayError
from hf_rocm.overlay import newer_release, plan, state
from hf_rocm.overlay.activate import activate, deactivate
from hf_rocm.overlay.catalog import Catalog
from hf_rocm.overlay.commands import install
from hf_rocm.overlay.difference import explain_change
from hf_rocm.overlay.scan import survey
from hf_rocm.overlay.state import FileState, Match
from tests.overlay.conftest import MODELS, Site, hashes, next_release

# Possible upstream changes: another default, another computation, and an additional class attribute.
EDITS: dict[str, tuple[str, str, str]] = {
    "gemma": ("GemmaRMSNorm", "eps: float = 1e-6", "eps: float = 1e-5"),
    "llama": ("LlamaMLP", "self.act_fn(self.gate_proj(x)) * self.up_proj(x)", "self.act_fn(self.gate_proj(x))"),
    "qwen3": (
        "Qwen3Attention",
        "class Qwen3Attention(nn.Module):",
        "class Qwen3Attention(nn.Module):\n    gated = True\n",
    ),
}


@pytest.fixture
def newer(site: Site, make: Callable[[str], Site]) -> Site:
    """Turn the site into an unknown release: every file differs, and some definitions have changed."""
    site.forget_record()
    site.set_release(next_release(site.installation.version))
    for model in MODELS:
        text = site.model(model).read_text(encoding="utf-8")
        name, old, new = EDITS.get(model, ("", "", ""))
        assert text.count(old) >= 1
        site.model(model).write_text(text.replace(old, new, 1 if name else 0) + "# a newer release\n", encoding="utf-8")
    return site


def states(site: Site, catalog: Catalog) -> dict[str, FileState]:
    return {state.model: state for state in survey(site.installation, catalog)}


def test_only_changed_models_are_refused(newer: Site, catalog: Catalog) -> None:
    result = states(newer, catalog)
    assert {model for model, state in result.items() if state.match is Match.CHANGED} == set(EDITS)
    assert result["bert"].match is Match.COMPATIBLE
    for model, (name, _, _) in EDITS.items():
        assert [difference.name for difference in result[model].differences] == [name]
        assert result[model].outgrown


@pytest.mark.parametrize("model", EDITS)
def test_the_message_names_the_definition_its_digests_and_the_releases(
    newer: Site, catalog: Catalog, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = states(newer, catalog)[model]
    error, (difference,) = state.mismatch(), state.differences
    assert isinstance(error, DigestMismatch)
    assert error.facts["expected"].startswith(f"{EDITS[model][0]} as in transformers ")
    assert all(digest in error.facts["expected"] for digest in difference.expected)
    assert str(difference.digest) in error.facts["found"]
    assert main(["install-overlays", model, "--transformers-path", str(newer.path)]) == 1
    assert str(error) in capsys.readouterr().err


@pytest.mark.parametrize("packed", [True, False], ids=["wheel", "folder"])
@pytest.mark.parametrize("model", EDITS)
def test_the_change_is_shown_against_a_known_release(
    newer: Site,
    make: Callable[[str], Site],
    model: str,
    packed: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = reference = make("known").path
    if packed:
        reference = tmp_path / "transformers-known.whl"
        with zipfile.ZipFile(reference, "w") as wheel:
            wheel.write(make("packed").model(model), f"transformers/models/{model}/modeling_{model}.py")
    main(["status", "--diff", model, "--against", str(reference), "--transformers-path", str(newer.path)])
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    name, _, new = EDITS[model]
    added = [line for line in lines if line.startswith("+")]
    assert any(part in "\n".join(added) for part in new.splitlines()[-1:]), shown
    assert name in shown and len(added) <= 2 and known.is_dir()


def test_a_path_without_transformers_cannot_be_compared_with(newer: Site, catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "other.whl").write_bytes(b"")
    for path in (tmp_path / "other.whl", tmp_path / "nothing", tmp_path):
        with pytest.raises(OverlayError, match="does not contain this file of transformers"):
            explain_change(states(newer, catalog)["llama"], path)
    assert main(["status", "--against", str(tmp_path), "--transformers-path", str(newer.path)]) == 2


def test_all_overlays_or_none_are_installed_unless_changed_models_are_skipped(
    newer: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    path_option = ["--transformers-path", str(newer.path)]
    before = hashes(newer.path)
    assert main(["install-overlays", *path_option]) == 1
    refused = capsys.readouterr().err
    assert all(name in refused for name, _, _ in EDITS.values())
    assert "`hf-rocm install-overlays --skip-changed` installs the other file" in refused
    assert hashes(newer.path) == before
    assert main(["install-overlays", "--skip-changed", *path_option]) == 0
    shown = capsys.readouterr().out
    for model, (name, _, _) in EDITS.items():
        assert f"{model} stays stock: upstream changed it: {name} differs" in shown
    assert {path for path, entry in hashes(newer.path).items() if before[path] != entry} == {
        "transformers/models/bert/modeling_bert.py"
    }
    assert main(["install-overlays", "--skip-changed", "--json", *path_option]) == 0
    assert set(json.loads(capsys.readouterr().out)["left_out"]["stock"]) == set(EDITS)


def test_many_changed_files_are_one_error_with_the_release_to_install(
    newer: Site, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path_option = ["--transformers-path", str(newer.path)]
    # `newest` is None if the overlay was checked with a newer release.
    newest = states(newer, catalog)["llama"].newest_checked
    monkeypatch.setenv("COLUMNS", "120")
    for module in (plan, newer_release, state, output, check_version):
        monkeypatch.setattr(module, "LISTED", 2)
    for command in (["install-overlays"], ["install-overlays", "--json"]):
        assert main([*command, *path_option]) == 1
        shown = capsys.readouterr()
        assert shown.err.count("error: ") == 1 and "3 of 4 files" in shown.err
        assert f"hint: {f'pip install transformers=={newest}; or' if newest else 'reinstall'} " in shown.err
    assert len(json.loads(shown.out)["refused"]) == 3, "the data does not list every file"
    assert main(["install-overlays", "--all", *path_option]) == 1
    assert capsys.readouterr().err.count("error: ") == 3
    assert main(["status", *path_option]) == 0
    shown = capsys.readouterr()
    assert "no         changed  gemma, llama and 1 more" in shown.out
    fix = f"pip install transformers=={newest}" if newest else "hf-rocm status --diff gemma"
    assert (
        shown.out.splitlines()[-1]
        == f"next: {fix}, or hf-rocm install-overlays --skip-changed (installs the other file)"
    )
    assert main(["status", "--all", *path_option]) == 0
    assert "LlamaMLP differs" in capsys.readouterr().out
    assert main(["install-overlays", "--skip-changed", "--dry-run", *path_option]) == 0
    assert "gemma, llama and 1 more stay stock: upstream changed it\n" in capsys.readouterr().out


def test_many_changed_files_are_counted_by_check_version(
    newer: Site, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    newer.set_release("5.99.0")
    path_option = ["--transformers-path", str(newer.path)]
    for module in (newer_release, check_version):
        monkeypatch.setattr(module, "LISTED", 2)
    assert check_version.main(path_option) == 1
    shown = capsys.readouterr()
    assert "models: do not proceed (--all lists" in shown.out and "upstream changed" not in shown.out
    assert f"pip install transformers=={states(newer, catalog)['llama'].newest_checked}" in shown.err
    assert check_version.main([*path_option, "--all"]) == 1
    assert "llama: do not proceed; upstream changed Llama" in " ".join(capsys.readouterr().out.split())


def test_the_hint_names_a_checked_release_if_this_one_is_newer(newer: Site, catalog: Catalog) -> None:
    error, newest = states(newer, catalog)["llama"].mismatch(), states(newer, catalog)["llama"].newest_checked
    assert error is not None and error.hint is not None
    assert (f"pip install transformers=={newest}," in error.hint) == (newest is not None)
    assert ("--force-reinstall" in error.hint) == (newest is None)


@pytest.mark.parametrize("definition_changed", [True, False])
def test_an_edited_file_is_skipped_with_another_reason(
    site: Site, definition_changed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    text = site.model("llama").read_text()
    edited = text.replace("class LlamaMLP(", "class LlamaMLQ(") if definition_changed else text + "\n# mine\n"
    site.model("llama").write_text(edited)
    before = hashes(site.path)
    path_option = ["--transformers-path", str(site.path)]
    assert main(["install-overlays", *path_option]) == 1
    assert "`hf-rocm install-overlays --skip-changed` installs the other " in capsys.readouterr().err
    assert hashes(site.path) == before
    assert main(["install-overlays", "--skip-changed", "--json", *path_option]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["refused"] == [] and "llama" not in {action["model"] for action in shown["actions"]}
    assert list(shown["left_out"]["stock"]) == ["llama"]
    assert shown["left_out"]["stock"]["llama"].startswith("its file was edited: ")
    assert site.model("llama").read_text() == edited and hashes(site.path) != before


def test_an_edited_block_is_not_skipped(site: Site) -> None:
    install(transformers_path=site.path)
    site.model("llama").write_text(site.model("llama").read_text().replace("class LlamaMLP(", "class LlamaMLQ("))
    before = hashes(site.path)
    plan, _ = install(transformers_path=site.path, skip_changed=True)
    assert len(plan.refusals) == 1 and hashes(site.path) == before


def test_activate_binds_the_other_models(newer: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ROCM_FORCE", "1")
    monkeypatch.setattr("hf_rocm.overlay.activate.locate", lambda: newer.installation)
    try:
        for model in EDITS:
            with pytest.raises(DigestMismatch, match="is not a file that this overlay was made for"):
                activate(model)
        assert activate("bert") == ["bert"]
    finally:
        deactivate()
