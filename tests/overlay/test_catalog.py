"""The overlay directory is selected per model: the newest one that has the model and covers the release."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from packaging.version import Version

from hf_rocm.errors import OverlayError
from hf_rocm.overlay.catalog import Catalog, release_span


def directory(root: Path, first: str, requires: str, *models: str, recorded: bool = True) -> None:
    folder = root / f"transformers-{first}"
    lines = [f'transformers = "{requires}"']
    for model in models:
        (folder / "models" / model).mkdir(parents=True)
        (folder / "models" / model / f"modeling_{model}.py").write_text('"""Overlay."""\n')
        if recorded:
            lines += [f"[{model}.files]", f"[{model}.names]"]
    (folder / "manifest.toml").write_text("\n".join(lines))


@pytest.fixture
def sample_catalog(tmp_path: Path) -> Catalog:
    directory(tmp_path, "4.9", ">=4.9,<4.11", "bert", "llama")
    directory(tmp_path, "4.10", ">=4.10,<4.11", "bert")
    directory(tmp_path, "5.0", ">=5.0,<6", "llama")
    return Catalog(tmp_path)


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("4.8.9", []),
        ("4.9.0", ["transformers-4.9/bert", "transformers-4.9/llama"]),
        ("4.10.2", ["transformers-4.10/bert", "transformers-4.9/llama"]),
        ("4.11.0", []),
        ("5.0.0", ["transformers-5.0/llama"]),
        ("5.7.0.dev0", ["transformers-5.0/llama"]),
        ("5.7.0+rocm1", ["transformers-5.0/llama"]),
        ("6.0.0", []),
        ("not a version", []),
    ],
)
def test_the_newest_directory_that_covers_the_release_is_used(
    sample_catalog: Catalog, release: str, expected: list[str]
) -> None:
    assert [overlay.id for overlay in sample_catalog.for_release(release)] == expected


def test_directories_are_ordered_as_versions(sample_catalog: Catalog) -> None:
    assert [result.name for result in sample_catalog.directories] == [
        "transformers-4.9",
        "transformers-4.10",
        "transformers-5.0",
    ]


def test_an_overlay_without_digests_is_not_offered_and_an_older_one_is_not_used_instead(tmp_path: Path) -> None:
    directory(tmp_path, "5.0", ">=5.0,<6", "llama")
    directory(tmp_path, "5.4", ">=5.4,<6", "llama", recorded=False)
    assert Catalog(tmp_path).find("llama", "5.5.0") is None
    assert Catalog(tmp_path).find("llama", "5.3.0") is not None


def test_a_symbolic_link_is_not_an_overlay(tmp_path: Path) -> None:
    directory(tmp_path, "5.0", ">=5.0,<6", "llama")
    file = tmp_path / "transformers-5.0/models/llama/modeling_llama.py"
    file.rename(tmp_path / "elsewhere.py")
    file.symlink_to(tmp_path / "elsewhere.py")
    assert Catalog(tmp_path).models() == []


def test_the_error_for_an_invalid_range_names_it(tmp_path: Path) -> None:
    directory(tmp_path, "5.0", "five and up", "llama")
    with pytest.raises(OverlayError) as refused:
        Catalog(tmp_path)
    assert refused.value.facts["file"].endswith("transformers-5.0/manifest.toml")


def test_every_release_with_the_model_is_served_or_excluded_with_a_reason(catalog: Catalog) -> None:
    recorded = {
        release
        for directory in catalog.directories
        for record in directory.manifest.records.values()
        for release in record.releases()
    }
    assert {"4.53.0", "4.53.3", "4.57.6", "5.0.0", "5.19.0", "5.23.0"} <= recorded
    for model in catalog.models():
        first = Version(catalog.releases(model)[0])
        for release in recorded:
            overlay = catalog.find(model, release)
            if overlay is None:
                assert catalog.leaves_out(model, release) or Version(release) < first, (model, release)
            elif Version(release) >= first:
                assert release in overlay.record.releases(), (overlay.id, release)
    assert {"bert", "gemma", "llama", "qwen3"} <= {overlay.model for overlay in catalog.for_release("4.53.0")}


def limit(root: Path, first: str, model: str, requires: str, reason: str) -> None:
    manifest = root / f"transformers-{first}" / "manifest.toml"
    manifest.write_text(
        manifest.read_text() + f"\n[{model}]\ntransformers = {json.dumps(requires)}\nreason = {json.dumps(reason)}\n"
    )


def test_a_model_may_have_its_own_range_and_an_older_directory_serves_the_rest(tmp_path: Path) -> None:
    directory(tmp_path, "4.9", ">=4.9,<6", "bert", "llama")
    directory(tmp_path, "5.0", ">=5.0,<6", "bert")
    limit(tmp_path, "5.0", "bert", ">=5.2,!=5.3.1", "it has another head")
    limit(tmp_path, "4.9", "llama", ">=4.10", "it differs in 4.9")
    result = Catalog(tmp_path)
    serving = {
        release: overlay.directory
        for release in ("4.9.0", "5.1.0", "5.2.0", "5.3.0", "5.3.1", "5.4.0")
        if (overlay := result.find("bert", release))
    }
    old, new = "transformers-4.9", "transformers-5.0"
    assert serving == {"4.9.0": old, "5.1.0": old, "5.2.0": new, "5.3.0": new, "5.3.1": old, "5.4.0": new}
    assert result.find("llama", "4.9.3") is None and result.find("llama", "5.0.0") is not None
    assert result.leaves_out("llama", "4.9.3") == "it differs in 4.9"
    assert result.leaves_out("llama", "5.0.0") is None
    assert result.ranges("llama") == [">=4.9,<6,>=4.10"]
    assert result.leaves_out("llama", "6.0.0") is None, "the directory's own range needs no reason"


def test_the_error_for_an_invalid_range_of_a_model_names_it(tmp_path: Path) -> None:
    directory(tmp_path, "5.0", ">=5.0,<6", "llama")
    limit(tmp_path, "5.0", "llama", "five and up", "")
    with pytest.raises(OverlayError) as refused:
        Catalog(tmp_path)
    assert refused.value.facts["file"].endswith("transformers-5.0/manifest.toml")


def test_a_release_span_names_the_oldest_and_the_newest_release() -> None:
    assert release_span(["5.10.0", "5.9.1", "5.4.0"]) == "5.4.0–5.10.0"
    assert release_span(["5.4.0"]) == "5.4.0"
