"""The state of a file has two parts: whether it has a block, and whether the overlay matches the stock part."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_rocm.errors import DigestMismatch, OverlayError
from hf_rocm.overlay import block
from hf_rocm.overlay.catalog import Catalog
from hf_rocm.overlay.commands import install
from hf_rocm.overlay.scan import survey
from hf_rocm.overlay.state import FileState, Installed, Match
from tests.overlay.conftest import MODELS, Site, fingerprint, next_release


def state(site: Site, catalog: Catalog, model: str = "llama") -> FileState:
    (finding,) = survey(site.installation, catalog, [model])
    return finding


def edit(site: Site, old: str, new: str, model: str = "llama") -> None:
    file = site.model(model)
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_the_installed_transformers_is_verified_for_every_model(catalog: Catalog) -> None:
    from hf_rocm.overlay.locate import locate

    states = survey(locate(), catalog)
    assert {result.model for result in states} >= set(MODELS)
    assert {result.match for result in states} == {Match.VERIFIED}


def test_known_digests_are_accepted_if_the_whole_file_is_unknown(site: Site, catalog: Catalog) -> None:
    site.forget_record()
    site.set_release(next_release(site.installation.version))
    for model in MODELS:
        site.model(model).write_bytes(site.model(model).read_bytes() + b"# another release\n")
    assert {result.match for result in survey(site.installation, catalog)} == {Match.COMPATIBLE}


def test_a_recorded_file_is_compatible_if_only_comments_changed(site: Site, catalog: Catalog) -> None:
    file = site.model("llama")
    before = state(site, catalog).stock
    file.write_bytes(before + b"# a distributor's note\n")
    record = site.metadata / "RECORD"
    text = record.read_text()
    line = next(line for line in text.splitlines() if line.startswith("transformers/models/llama/modeling_llama.py"))
    record.write_text(
        text.replace(line, f"transformers/models/llama/modeling_llama.py,{_record_hash(file.read_bytes())}")
    )
    assert state(site, catalog).match is Match.COMPATIBLE


def _record_hash(data: bytes) -> str:
    import base64
    import hashlib

    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest},{len(data)}"


@pytest.mark.parametrize("with_record", [True, False])
def test_one_more_byte_in_a_known_release_is_an_edit(site: Site, catalog: Catalog, with_record: bool) -> None:
    if not with_record:
        site.forget_record()
    site.model("llama").write_bytes(site.model("llama").read_bytes() + b"\n")
    result = state(site, catalog)
    assert result.match is Match.CHANGED
    error = result.mismatch()
    assert isinstance(error, DigestMismatch)
    assert error.facts["file"] == str(site.model("llama"))
    assert error.facts["expected"] != error.facts["found"]
    assert "edited" in error.facts["found"]
    assert "reinstall" in (error.hint or "")


@pytest.mark.parametrize("ending", [b"\r\n", b"\n"])
def test_other_line_endings_and_a_byte_order_mark_are_edits(site: Site, catalog: Catalog, ending: bytes) -> None:
    data = site.model("llama").read_bytes()
    site.model("llama").write_bytes(b"\xef\xbb\xbf" + data if ending == b"\n" else data.replace(b"\n", ending))
    assert state(site, catalog).match is Match.CHANGED


def test_a_changed_definition_is_named_with_its_digests(site: Site, catalog: Catalog) -> None:
    site.forget_record()
    site.set_release(next_release(site.installation.version))
    edit(site, "class LlamaMLP(nn.Module):", "class LlamaMLP(nn.Module):\n    changed = True\n")
    result = state(site, catalog)
    assert result.match is Match.CHANGED
    (difference,) = result.differences
    assert difference.name == "LlamaMLP"
    assert difference.digest not in difference.expected
    error = result.mismatch()
    assert isinstance(error, DigestMismatch)
    assert error.facts["file"] == str(site.model("llama"))
    assert error.facts["expected"].startswith("LlamaMLP as in transformers")
    assert str(difference.digest) in error.facts["found"]
    assert "status --diff llama" in (error.hint or "")


def test_a_removed_definition_counts_as_changed(site: Site, catalog: Catalog) -> None:
    site.forget_record()
    site.set_release(next_release(site.installation.version))
    edit(site, "class LlamaMLP(", "class LlamaFeedForward(")
    error = state(site, catalog).mismatch()
    assert error is not None and "no such definition" in error.facts["found"]


def test_a_file_with_a_syntax_error_counts_as_changed(site: Site, catalog: Catalog) -> None:
    site.forget_record()
    site.set_release(next_release(site.installation.version))
    site.model("llama").write_bytes(b"def (:\n\x00")
    assert state(site, catalog).match is Match.CHANGED


def test_a_missing_file_counts_as_changed(site: Site, catalog: Catalog) -> None:
    site.model("llama").unlink()
    result = state(site, catalog)
    assert result.match is Match.CHANGED
    assert result.mismatch() is not None and result.mismatch().facts["found"] == "none"  # type: ignore[union-attr]


@pytest.mark.parametrize("release", ["4.52.4", "6.1.0"])
def test_an_unknown_release_is_refused_with_the_known_ranges(site: Site, catalog: Catalog, release: str) -> None:
    site.set_release(release)
    with pytest.raises(OverlayError) as refused:
        state(site, catalog)
    assert refused.value.facts["found"] == release
    assert refused.value.facts["expected"] == " or ".join(catalog.ranges("llama"))
    assert refused.value.hint


def test_a_block_in_an_unknown_release_is_unsupported(site: Site, catalog: Catalog) -> None:
    install(["llama"], transformers_path=site.path)
    site.set_release("6.1.0")
    (finding,) = survey(site.installation, catalog)
    assert (finding.installed, finding.match) == (Installed.OLD, Match.UNSUPPORTED)


def test_an_unknown_model_is_an_error(site: Site, catalog: Catalog) -> None:
    with pytest.raises(OverlayError, match="no overlay for 'mistrall'") as refused:
        state(site, catalog, "mistrall")
    assert " models, such as mistral" in refused.value.facts["expected"]
    assert "route_linear" not in (refused.value.hint or "")


def test_the_error_for_a_model_without_an_overlay_has_a_hint(site: Site, catalog: Catalog) -> None:
    folder = site.installation.root / "models" / "gpt_neo"
    folder.mkdir(exist_ok=True)
    (folder / "modeling_gpt_neo.py").touch()
    with pytest.raises(OverlayError, match="no overlay for 'gpt_neo'") as refused:
        state(site, catalog, "gpt_neo")
    assert "route_linear" in refused.value.hint and "docs/adding-a-model.md" in refused.value.hint


def test_installed_is_determined_from_the_file(site: Site, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    assert state(site, catalog).installed is Installed.NO
    install(["llama"], transformers_path=site.path)
    assert (state(site, catalog).installed, state(site, catalog).match) == (Installed.YES, Match.VERIFIED)
    monkeypatch.setattr("hf_rocm.overlay.state.__version__", "99.0")
    assert (state(site, catalog).installed, state(site, catalog).match) == (Installed.OLD, Match.VERIFIED)
    edit(site, "# <<< hf-rocm", "x = 1\n# <<< hf-rocm")
    assert (state(site, catalog).installed, state(site, catalog).match) == (Installed.EDITED, Match.VERIFIED)


def test_an_edit_of_the_stock_part_changes_both_parts_of_the_state(site: Site, catalog: Catalog) -> None:
    install(["llama"], transformers_path=site.path)
    edit(site, "class LlamaMLP", "\nclass LlamaMLP")
    assert (state(site, catalog).installed, state(site, catalog).match) == (Installed.EDITED, Match.CHANGED)


def test_a_symbolic_link_is_read_but_not_written(site: Site, catalog: Catalog, tmp_path: Path) -> None:
    file = site.model("llama")
    file.rename(tmp_path / "cache.py")
    file.symlink_to(tmp_path / "cache.py")
    assert state(site, catalog).match is Match.VERIFIED
    before = fingerprint(tmp_path)
    plan, _ = install(["llama"], transformers_path=site.path)
    (refused,) = plan.refusals
    assert refused.facts["found"] == f"a link to {tmp_path / 'cache.py'}"
    assert "UV_LINK_MODE=copy" in (refused.hint or "")
    assert fingerprint(tmp_path) == before


def test_a_fifo_is_refused_and_does_not_hang(site: Site, catalog: Catalog) -> None:
    import os

    site.model("llama").unlink()
    os.mkfifo(site.model("llama"))
    with pytest.raises(OverlayError, match="is not a file"):
        state(site, catalog)


def test_every_recorded_release_has_one_file_per_model(catalog: Catalog) -> None:
    for directory in catalog.directories:
        for model, record in directory.manifest.records.items():
            releases = [release for result in record.files.values() for release in result]
            assert len(releases) == len(set(releases)), (directory.name, model)
            for seen in record.names.values():
                assert sorted(r for result in seen.values() for r in result) == sorted(releases)


def test_the_rendered_file_is_stock_and_block(site: Site, catalog: Catalog) -> None:
    result = state(site, catalog)
    assert result.rendered().startswith(result.stock)
    parts = block.split(result.rendered())
    assert parts is not None and result.overlay is not None
    assert result.overlay.text.encode() in parts.block
