"""`get_image_features` and `get_text_features` of models with two towers are recorded like the models' forwards."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import hf_rocm
from hf_rocm import patches
from tests.forwards.conftest import call, counted, equal, reasons
from tests.forwards.families import CLIP_TEXT, IMAGE, TEXT, inputs

SIGLIP_TEXT = {**TEXT, "projection_size": 32, "eos_token_id": 3, "bos_token_id": 2}


def make(name):
    torch.manual_seed(3)
    if name == "clip":
        config = transformers.CLIPConfig(text_config=CLIP_TEXT, vision_config=IMAGE, projection_dim=16)
        return transformers.CLIPModel(config).eval()
    return transformers.SiglipModel(transformers.SiglipConfig(text_config=SIGLIP_TEXT, vision_config=IMAGE)).eval()


@pytest.fixture(params=["clip", "siglip"])
def twins(request, recorded_on_cpu):
    stock = make(request.param)
    prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    return prepared, hf_rocm.prepare(stock, force=True, graphs=False)


@pytest.mark.parametrize("method", ["get_image_features", "get_text_features"])
def test_features_are_recorded(method, twins):
    prepared = twins[0]
    family = "vit" if method == "get_image_features" else "clip-text"
    kept = []
    for seed in range(8):
        arguments = inputs(family, seed=seed)
        output, expected = (call(getattr(model, method), arguments) for model in twins)
        assert equal(output, expected)
        kept.append((output, expected))
    # Later calls did not change the earlier results.
    assert all(equal(*both) for both in kept)
    assert counted(prepared)[0] == 1 and counted(prepared)[1] > 3 and not reasons(prepared)


def test_methods_and_the_forward_have_their_own_recordings(twins):
    prepared, stock = twins
    for seed in range(5):
        images, words = inputs("vit", seed=seed), inputs("clip-text", seed=seed)
        assert equal(call(prepared.get_image_features, images), call(stock.get_image_features, images))
        assert equal(call(prepared.get_text_features, words), call(stock.get_text_features, words))
        assert equal(call(prepared, {**images, **words}), call(stock, {**images, **words}))
    assert counted(prepared)[0] == 3 and counted(prepared)[1] > 2


def test_a_replaced_method_is_called(recorded_on_cpu, monkeypatch):
    stock = make("clip")
    calls = []
    monkeypatch.setattr(type(stock), "get_image_features", lambda self, **arguments: calls.append(arguments))
    prepared = hf_rocm.prepare(stock, force=True)
    for _ in range(4):
        call(prepared.get_image_features, inputs("vit"))
    assert len(calls) == 4


def test_features_of_two_models_of_a_class_are_recorded_and_restored(twins):
    prepared, stock = twins
    second = hf_rocm.prepare(make("clip" if type(stock) is transformers.CLIPModel else "siglip"), force=True)
    for seed in range(5):
        arguments = inputs("vit", seed=seed)
        assert equal(call(second.get_image_features, arguments), call(stock.get_image_features, arguments))
    assert counted(second)[1] > 0
    for model in (prepared, second):
        hf_rocm.restore(model)
    method = vars(type(stock))["get_image_features"]
    assert patches.original(type(stock), "get_image_features") is method
