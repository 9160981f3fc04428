"""Features lean on parts of transformers that are known; where one is another, the feature is off and says why."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from transformers import GenerationMixin

import hf_rocm
from hf_rocm import features
from tests.generation.conftest import generate, make

PART = "transformers.generation.utils:GenerationMixin._update_model_kwargs_for_generation"


@pytest.fixture(autouse=True)
def forgotten():
    """What was found out is found out anew."""
    features._unlike.cache_clear()
    yield
    features._unlike.cache_clear()


@pytest.fixture
def text(monkeypatch):
    """Changes the text of transformers' generation module, as features see it."""

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


def test_this_release_is_known():
    assert features.refused() == {}


def test_every_part_is_recorded():
    for name, parts in features.FEATURES.items():
        record = features._manifest().records[name]
        assert set(parts) == set(record.names), "run scripts/refresh-digests"
        assert transformers.__version__ in record.releases()


def test_a_change_elsewhere_in_the_file_changes_nothing(text):
    text(rb"\Z", b"\n\ndef another():\n    return 1\n")
    assert features.refused() == {}


def test_a_changed_function_turns_off_what_leans_on_it_and_nothing_else(text):
    text(rb"((?s:def _update_model_kwargs_for_generation\(.*?))num_new_tokens: int = 1", rb"\1num_new_tokens: int = 2")
    assert list(features.refused()) == ["decode_inputs"]
    reason = features.refuses("decode_inputs")
    assert reason is not None
    version = re.escape(transformers.__version__)
    part = r"GenerationMixin\._update_model_kwargs_for_generation"
    assert re.fullmatch(rf"{part} of transformers {version} is not supported \(digest \w{{16}}\)", reason)


def test_a_function_that_somebody_replaced_turns_it_off(monkeypatch):
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


def test_the_overlays_go_on_without_it(text):
    stock = make("llama")
    wanted = generate(stock, cache_implementation="static")
    text(rb"((?s:def _update_model_kwargs_for_generation\(.*?))num_new_tokens: int = 1", rb"\1num_new_tokens: int = 2")
    ours = hf_rocm.prepare(stock, force=True, graphs=False)
    assert "_hf_rocm_inputs" not in ours.__dict__
    assert torch.equal(generate(ours, cache_implementation="static"), wanted)
    said = hf_rocm.explain(ours)
    assert any(part.active for part in said.parts)
    assert "is not supported (digest" in ours.__dict__["_hf_rocm_report"]["inputs"]
