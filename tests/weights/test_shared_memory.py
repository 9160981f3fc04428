"""Weights that share memory with another model are not moved, so that writes affect both models."""

from __future__ import annotations

import gc

import pytest
import torch

import hf_rocm
from hf_rocm.layers.weight_group import SLOT, WeightGroup
from hf_rocm.weights.fuse import Fused, why_not
from tests.generation.conftest import make
from tests.weights import models
from tests.weights.models import GROUPS, assert_matches_stock, live, logits

NAMES = ("q_proj", "k_proj", "v_proj")


def two_models():
    """Returns two models that share memory, as after `load_state_dict(assign=True)`."""
    one, other = models.build(), models.build()
    other.load_state_dict(one.state_dict(), assign=True)
    return one, other


def addresses(model):
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("prepared", [0, 1])
@pytest.mark.parametrize("written", [0, 1])
def test_a_write_to_one_model_reaches_both(prepared, written):
    pair = two_models()
    hf_rocm.prepare(pair[prepared], force=True)
    assert addresses(pair[0]) == addresses(pair[1]) and live(pair[prepared]) == 0
    before = logits(pair[0])
    with torch.no_grad():
        for parameter in pair[written].parameters():
            parameter.mul_(1.5)
    assert torch.equal(logits(pair[0]), logits(pair[1])) and not torch.equal(logits(pair[0]), before)
    reason = why_not(pair[prepared].model.layers[0].self_attn, NAMES)
    assert "another model" in reason and reason in hf_rocm.explain(pair[prepared]).details()
    assert reason in pair[prepared].__dict__["_hf_rocm_report"]["skipped"].values()


def test_a_training_step_of_one_model_reaches_the_other():
    prepared, other = two_models()
    hf_rocm.prepare(prepared, force=True)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(models.IDS, labels=models.IDS).loss.backward()
    optimizer.step()
    assert torch.equal(logits(prepared), logits(other))


def test_weights_are_fused_once_the_other_model_is_freed():
    prepared, other = two_models()
    hf_rocm.prepare(prepared, force=True)
    logits(prepared)
    del other
    gc.collect()
    assert_matches_stock(prepared, GROUPS)


def test_a_fused_model_whose_memory_is_shared_later_stays_fused_and_shares_it():
    prepared, other = models.prepared(), models.build()
    other.load_state_dict(prepared.state_dict(), assign=True)
    assert_matches_stock(prepared, GROUPS)
    for change in (
        lambda: prepared.to("cpu"),  # changes nothing
        lambda: hf_rocm.prepare(prepared, force=True),
        lambda: hf_rocm.restore(prepared),
    ):
        change()
        assert addresses(prepared) == addresses(other)
        with torch.no_grad():
            other.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
        torch.testing.assert_close(logits(prepared), logits(other))
    assert torch.equal(logits(prepared), logits(other))


def listed_experts(model):
    return any(isinstance(module._modules.get("experts"), torch.nn.ModuleList) for module in model.modules())


def test_stacked_experts_are_not_moved_either():
    if not listed_experts(make("mixtral")):
        pytest.skip("this release keeps the experts of an MoE block in stacked parameters, which are never moved")
    prepared, other = make("mixtral"), make("mixtral")
    other.load_state_dict(prepared.state_dict(), assign=True)
    hf_rocm.prepare(prepared, force=True)
    assert addresses(prepared) == addresses(other)
    other_alone = hf_rocm.prepare(make("mixtral"), force=True)
    assert addresses(other_alone).keys() == addresses(prepared).keys()
    assert {type(group) for group in groups(other_alone)} > {Fused} and groups(prepared) == []


def groups(model):
    return [entry for module in model.modules() if isinstance(entry := module.__dict__.get(SLOT), WeightGroup)]


def test_references_to_the_parameters_do_not_prevent_fusing():
    """Optimizers, autograd graphs and lists refer to the parameter objects, not to their memory."""
    model = models.build()
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(models.IDS, labels=models.IDS).loss
    loss.backward()
    optimizer.step()
    listed = list(model.parameters())
    hf_rocm.prepare(model, force=True)
    assert live(model) == GROUPS and len(listed)
