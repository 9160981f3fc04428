"""A correct model passes, runs hf_rocm's operations, and is unchanged afterwards."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest
import torch
import transformers

import hf_rocm
from hf_rocm.errors import VerifyError
from hf_rocm.loading.prepare import report_of
from hf_rocm.tools.verify.check import NOT_RUN, PASSED
from hf_rocm.tools.verify.report import VERSION
from tests.tools.verify import faults
from tests.tools.verify.conftest import available

ALL = ("prompt", "padded batch", "padding", "restore", "weights", "torch tier", "eager tier")
DECODER = (*ALL, "filled cache", "static cache", "greedy tokens")
SLIDING = (*DECODER, "sliding window")


@pytest.mark.parametrize(
    ("name", "dtype", "passed"),
    available(
        ("llama", torch.float32, DECODER),
        ("qwen3", torch.bfloat16, DECODER),
        ("gemma2", torch.bfloat16, SLIDING),
        ("gpt_oss", torch.float32, SLIDING),
        ("mistral", torch.bfloat16, SLIDING),
        ("bert", torch.float32, ALL),
    ),
)
def test_a_correct_model_passes(name, dtype, passed, build):
    model = build(name, dtype)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = hf_rocm.verify(model, force=True, quick=True)
    assert report.passed, str(report)
    assert {check.name for check in report.checks if check.status == PASSED} >= set(passed)
    assert all(check.note for check in report.checks if check.status == NOT_RUN)
    assert report.check("aiter tier").status == NOT_RUN and "aiter" in report.check("aiter tier").note
    # hf_rocm's path ran
    assert "attention" in report.tiers and {"linear"} & set(report.tiers)
    assert len(report.layers) == 2 and all(0 < layer.own <= layer.allowed for layer in report.layers)
    # The tolerance is twice stock's error in this dtype, plus a rounding step. Mixture-of-experts models use the median
    # token's error.
    if name != "gpt_oss":
        check = report.check("prompt")
        assert check.allowed == pytest.approx(2 * check.numbers["stock_error"] + torch.finfo(dtype).eps)
        assert check.numbers["stock_error"] > 0 and check.error > 0
    # the model is stock again, bitwise
    assert not [key for module in model.modules() for key in vars(module) if key.startswith("_hf_rocm")]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("positions", [16, 22])
def test_a_model_with_few_positions_is_checked_with_shorter_prompts(positions, build):
    model = build("llama")
    model.config.max_position_embeddings = positions
    report = hf_rocm.verify(model, force=True, quick=True)
    assert report.passed and {check.name for check in report.checks if check.status == PASSED} >= {*DECODER}


@pytest.mark.parametrize("graphs", [False, None])
def test_a_prepared_model_keeps_its_setting_for_recordings(graphs, build):
    model = hf_rocm.prepare(build("llama"), force=True, graphs=graphs)
    before = report_of(model)["graphs"]
    assert hf_rocm.verify(model, quick=True).passed
    assert report_of(model)["graphs"] == before and before["requested"] is graphs


def test_logits_that_are_not_numbers_fail_without_an_error(build):
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    assert not hf_rocm.verify(model, force=True, quick=True).passed


def test_an_encoder_decoder_with_few_positions_is_checked(build):
    model = build("bart")
    model.config.max_position_embeddings = 32
    assert hf_rocm.verify(model, force=True, quick=True).passed


def test_the_report_is_complete_as_text_and_as_data(build, monkeypatch):
    """The model is prepared and in training mode before and after the call."""
    model = faults.prepared(build("llama")).train()
    report = hf_rocm.verify(model, force=True, train=True)
    assert model.training and report.passed, str(report)
    with torch.no_grad():
        explanation = hf_rocm.explain(model)
    assert explanation.state.startswith("served")
    assert next(part for part in explanation.parts if part.cls == "LlamaMLP").fused == 2
    assert report.check("save_pretrained").status == report.check("training").status == PASSED
    assert report.check("greedy tokens").numbers["steps"] > 100
    data = json.loads(json.dumps(report.to_dict()))
    assert data["version"] == VERSION and data["passed"] is True and data["model"] == "LlamaForCausalLM"
    assert set(data) == {"version", "passed", "model", "machine", "checks", "layers", "tiers", "seconds"}
    for check in data["checks"]:
        assert set(check) == {"name", "title", "status", "error", "allowed", "numbers", "note", "fault"}
        assert re.search(rf"^{check['name']} +{check['status']}", str(report), re.M)
    numbers = report.check("prompt").numbers
    assert numbers["same_top1"] == numbers["within_5e-2"] == 1 and 0 < numbers["kl"] < 1e-9
    assert {"device", "dtype", "reference", "versions"} == set(data["machine"])
    monkeypatch.setenv("COLUMNS", "80")
    lines = str(report).splitlines()
    assert lines[-2].startswith("LlamaForCausalLM: all ") and lines[-1].startswith("next: hf-rocm bench")
    assert len(lines) <= 30 and max(map(len, lines)) <= 80 and "model.layers.0" not in str(report)
    assert "model.layers.0" in report.details() and "same top-1" in report.details()
    assert "checks passed, " in report.picture()
    drawing = ElementTree.fromstring(report.picture())
    assert len(drawing.findall(".//{*}polyline")) == 2 and "LlamaForCausalLM" in report.picture()


@pytest.mark.parametrize(
    ("make", "force", "words"),
    [
        (lambda build: build("llama"), None, "not a ROCm build"),
        (lambda build: build("vit"), True, "takes no input_ids"),
        (lambda build: hf_rocm.quantize(faults.prepared(build("llama")), "int8", force=True), True, "is quantised"),
    ],
)
def test_models_that_cannot_be_verified_are_refused(make, force, words, build):
    with pytest.raises(VerifyError, match=words):
        hf_rocm.verify(make(build), force=force)


def test_tokens_of_another_vocabulary_are_refused(build):
    with pytest.raises(VerifyError, match="at least 64"):
        hf_rocm.verify(build("llama"), force=True, ids=torch.full((80,), 131))


def test_an_unserved_model_is_refused(build, monkeypatch):
    monkeypatch.setattr("hf_rocm.loading.prepare._bind_overlays", lambda model: ([], {"llama": "changed upstream"}))
    monkeypatch.setattr("hf_rocm.overlay.bind.binding_of", lambda module: None)
    with pytest.raises(VerifyError, match="no layer of LlamaForCausalLM is served") as refused:
        hf_rocm.verify(build("llama"), force=True)
    assert refused.value.facts == {"llama": "changed upstream"}
    assert "route_linear" not in refused.value.hint


def test_the_error_for_a_model_without_an_overlay_has_a_hint():
    config = transformers.GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, attention_types=[[["global"], 1]]
    )
    with pytest.raises(VerifyError, match="no layer of GPTNeoForCausalLM is served") as refused:
        hf_rocm.verify(transformers.GPTNeoForCausalLM(config).eval(), force=True)
    assert "route_linear" in refused.value.hint and "docs/adding-a-model.md" in refused.value.hint
