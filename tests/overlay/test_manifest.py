"""Manifests are read back as written, and cover exactly the names that their overlays import from transformers."""

from __future__ import annotations

import pytest

from hf_rocm.errors import OverlayError
from hf_rocm.overlay import manifest
from hf_rocm.overlay.catalog import Catalog
from hf_rocm.overlay.manifest import Manifest, Record

RELEASES = tuple(f"5.{minor}.0" for minor in range(4, 40))
MANIFEST = Manifest(
    ">=5.4,<6",
    {
        "bert": Record({"a" * 64: ("5.4.0",)}, {"transformers.activations:ACT2FN": {"e" * 16: ("5.4.0",)}}),
        "llama": Record(
            {"b" * 64: RELEASES, "c" * 64: ("5.40.0",)},
            {"transformers.models.llama.modeling_llama:LlamaMLP": {"d" * 16: RELEASES}},
        ),
    },
)


def test_a_manifest_is_read_as_it_was_written() -> None:
    text = manifest.render(MANIFEST)
    assert manifest.parse(text, source="here") == MANIFEST
    assert manifest.render(manifest.parse(text, source="here")) == text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    "text",
    [
        "",
        "transformers = 5",
        "transformers = ",
        'transformers = ">=5"\n[llama]\nfiles = 3',
        'transformers = ">=5"\nllama = 1',
    ],
)
def test_a_broken_manifest_is_refused_by_name(text: str) -> None:
    with pytest.raises(OverlayError) as refused:
        manifest.parse(text, source="/some/manifest.toml")
    assert refused.value.facts["file"] == "/some/manifest.toml"


IMPORTS = """
from hf_rocm import ops
if ops:
    from transformers.a.b import X, Y as Z
    def f():
        from transformers import W
"""


def test_dependencies_are_all_imports_from_transformers_in_the_source() -> None:
    assert manifest.dependencies(IMPORTS) == ["transformers.a.b:X", "transformers.a.b:Y", "transformers:W"]


def test_alternative_names_of_releases_are_one_dependency() -> None:
    text = 'overlay.binds_first("transformers.models.demo.modeling_demo", NewNorm=norm, OldNorm=norm)'
    name = "transformers.models.demo.modeling_demo:NewNorm|OldNorm"
    assert manifest.dependencies(text) == [name]
    written = manifest.render(Manifest(">=5", {"demo": Record({"0" * 64: ("5.0.0",)}, {name: {"1": ("5.0.0",)}})}))
    assert set(manifest.parse(written, source="here").records["demo"].names) == {name}


def test_every_manifest_covers_exactly_what_its_overlays_import(catalog: Catalog) -> None:
    for directory in catalog.directories:
        assert sorted(directory.files) == sorted(directory.manifest.records), directory.name
        for model, path in directory.files.items():
            record = directory.manifest.records[model]
            assert sorted(record.names) == manifest.dependencies(path.read_text(encoding="utf-8")), (
                directory.name,
                model,
            )
            assert all(record.names.values()), "a name without a digest"
