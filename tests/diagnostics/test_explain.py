"""explain tells what is, in words and as data."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import hf_rocm
from hf_rocm import options
from hf_rocm.overlay import bind
from tests.parity import models
from tests.parity.models import tokens


@pytest.fixture
def llama(tmp_path):
    return models.load_ours(models.save_checkpoint("llama", tmp_path, torch.float32))


def part(model, name):
    return next(each for each in hf_rocm.explain(model).parts if each.cls == name)


def test_a_served_model(llama):
    with torch.inference_mode():
        explanation = hf_rocm.explain(llama)
    assert explanation.state == "served by hf_rocm, forced on this machine"
    assert explanation.machine["ROCm"] == "none" and explanation.machine["dtype"] == "float32"
    attention, mlp, norm = (
        next(each for each in explanation.parts if each.cls == name)
        for name in ("LlamaAttention", "LlamaMLP", "LlamaRMSNorm")
    )
    assert (attention.instances, attention.active, attention.fused) == (2, 2, 2)
    assert attention.group == ("q_proj", "k_proj", "v_proj") and attention.delivery == "in memory"
    assert mlp.fused == 2 and norm.group == () and norm.instances == 5
    routed = {(each.operation, each.tier) for each in explanation.kernels}
    assert {("attention", "torch"), ("linear", "torch"), ("act_and_mul", "torch"), ("rms_norm", "torch")} <= routed


def test_the_text_and_the_data_say_the_same(llama):
    with torch.inference_mode():
        explanation = hf_rocm.explain(llama)
    data = json.loads(json.dumps(explanation.to_dict()))
    assert data["parts"][0]["cls"] in str(explanation)
    for each in data["kernels"]:
        assert f"{each['operation']} ({each['situation']}): {each['tier']}, {each['kernel']}" in str(explanation)
    assert "fused 2 of 2: q_proj + k_proj + v_proj" in str(explanation)


def test_gradients_are_told_apart_from_what_keeps_layers_from_being_fused(llama):
    attention = part(llama, "LlamaAttention")
    assert attention.gradients and attention.fused == 2 and attention.not_fused == {}
    assert "one by one while gradients are on" in str(hf_rocm.explain(llama))
    with torch.no_grad():
        assert not part(llama, "LlamaAttention").gradients
        assert "gradients" not in str(hf_rocm.explain(llama))


def test_what_changed_after_preparing_is_told(llama):
    attention = llama.model.layers[0].self_attn
    attention.q_proj.register_forward_hook(lambda *arguments: None)
    llama.model.layers[1].mlp.up_proj = nn.Identity()
    with torch.no_grad():
        assert part(llama, "LlamaAttention").fused == 1
        assert "hook" in next(iter(part(llama, "LlamaAttention").not_fused))
        assert "Identity" in next(iter(part(llama, "LlamaMLP").not_fused))


def test_a_stock_call_leaves_its_reason(llama):
    with torch.no_grad():
        llama(input_ids=tokens(1, 4))
        assert part(llama, "LlamaAttention").stayed_stock == {}
        llama.config._attn_implementation = "eager"
        llama(input_ids=tokens(1, 4))
        assert "'eager' was asked for" in next(iter(part(llama, "LlamaAttention").stayed_stock))
        llama.config._attn_implementation = "sdpa"
        llama(input_ids=tokens(1, 4))
        assert part(llama, "LlamaAttention").stayed_stock == {}


def test_a_named_tier_shows_in_every_refusal(llama):
    with torch.no_grad(), options.override(tier="eager"):
        kernels = hf_rocm.explain(llama).kernels
        assert {each.tier for each in kernels} == {"eager"}
        assert all("the eager tier was named" in dict(each.refused).values() for each in kernels)
    with torch.no_grad(), options.override(tier="triton"):
        kernels = hf_rocm.explain(llama).kernels
        assert {each.tier for each in kernels} == {"none"}
        assert all("triton" in " ".join(reason for _, reason in each.refused).lower() for each in kernels)


def test_a_restored_model(llama):
    hf_rocm.restore(llama)
    explanation = hf_rocm.explain(llama)
    assert explanation.state.startswith("stock") and explanation.kernels == ()
    assert all(each.active == 0 for each in explanation.parts)


def test_explaining_changes_nothing(llama):
    before = {path: dict(vars(module)) for path, module in llama.named_modules()}
    with torch.no_grad():
        hf_rocm.explain(llama)
    after = {path: dict(vars(module)) for path, module in llama.named_modules()}
    assert before.keys() == after.keys() and all(before[path].keys() == after[path].keys() for path in before)
    assert bind.mode_of(llama.model.layers[0].mlp) == bind.ON
