"""A feature depends on known parts of transformers. If one of them differs, the feature is disabled with a reason."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from transformers import GenerationMixin, cache_utils

import hf_rocm
from hf_rocm import features
from tests.generation.conftest import generate, make

PART = "transformers.generation.utils:GenerationMixin._update_model_kwargs_for_generation"


@pytest.fixture(autouse=True)
def cleared():
    """Clear the cached results."""
    features._unrecorded.cache_clear()
    yield
    features._unrecorded.cache_clear()


@pytest.fixture
def text(monkeypatch):
    """A function that changes the source of transformers' generation module, as read by `features`."""

    def change(pattern, replacement):
        read = features._file

        def changed(module):
            content = read(module)
            if module != "transformers.generation.utils":
                return content
            other, count = re.subn(pattern, replacement, content, count=1)
            assert count == 1
            return other

        monkeypatch.setattr(features, "_file", changed)

    return change


def test_this_release_is_supported():
    assert features.refused() == {}


def test_every_part_has_a_digest():
    for name, parts in features.FEATURES.items():
        record = features._manifest().records[name]
        assert set(parts) == set(record.names), "run scripts/refresh-digests"
        assert transformers.__version__ in record.releases()


def test_a_change_elsewhere_in_the_file_changes_nothing(text):
    text(rb"\Z", b"\n\ndef another():\n    return 1\n")
    assert features.refused() == {}


def test_a_changed_function_turns_off_only_the_features_that_use_it(text):
    text(rb"((?s:def _update_model_kwargs_for_generation\(.*?))num_new_tokens: int = 1", rb"\1num_new_tokens: int = 2")
    assert list(features.refused()) == ["decode_inputs"]
    reason = features.refuses("decode_inputs")
    assert reason is not None
    version = re.escape(transformers.__version__)
    part = r"GenerationMixin\._update_model_kwargs_for_generation"
    assert re.fullmatch(rf"{part} of transformers {version} is not supported \(digest \w{{16}}\)", reason)


def test_a_replaced_function_turns_a_feature_off(monkeypatch):
    def other(self, outputs, model_kwargs, is_encoder_decoder=False, num_new_tokens=1):
        raise NotImplementedError

    monkeypatch.setattr(GenerationMixin, "_update_model_kwargs_for_generation", other)
    name = "GenerationMixin._update_model_kwargs_for_generation"
    assert features.refuses("decode_inputs") == (
        f"a part of transformers that it depends on was replaced: {name} was replaced by {__name__}"
    )
    assert features.refuses("graph_decode") is None
    monkeypatch.undo()
    assert features.refuses("decode_inputs") is None


@pytest.mark.parametrize("checked", (True, False), ids=["after", "before"])
def test_a_class_replaced_after_or_before_the_first_check_turns_a_feature_off(monkeypatch, checked):
    class Other(cache_utils.DynamicCache):
        def update(self, *arguments, **options):
            raise NotImplementedError

    monkeypatch.setattr(features, "_watches", {})
    if checked:
        assert features.refuses("dynamic_cache") is None
    with monkeypatch.context() as replacement:
        replacement.setattr(cache_utils, "DynamicCache", Other)
        assert features.refuses("dynamic_cache") == (
            "a part of transformers that it depends on was replaced: "
            f"DynamicCache of transformers.cache_utils was replaced by {__name__}"
        )
        assert features.refuses("graph_decode") is None
    assert features.refuses("dynamic_cache") is None


def test_the_overlays_work_without_the_feature(text):
    stock = make("llama")
    expected = generate(stock, cache_implementation="static")
    text(rb"((?s:def _update_model_kwargs_for_generation\(.*?))num_new_tokens: int = 1", rb"\1num_new_tokens: int = 2")
    prepared = hf_rocm.prepare(stock, force=True, graphs=False)
    assert "_hf_rocm_inputs" not in prepared.__dict__
    assert torch.equal(generate(prepared, cache_implementation="static"), expected)
    explanation = hf_rocm.explain(prepared)
    assert any(part.active for part in explanation.parts)
    assert "is not supported (digest" in prepared.__dict__["_hf_rocm_report"]["inputs"]
