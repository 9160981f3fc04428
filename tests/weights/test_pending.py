"""Groups that are fused at their first use, because weights are in a mapped checkpoint or not yet on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import hf_rocm
from hf_rocm.layers.weight_group import PENDING, SLOT, is_idle
from hf_rocm.loading import prepare as preparing
from hf_rocm.overlay import bind
from hf_rocm.weights import mmap_pages
from hf_rocm.weights.fuse import why_not
from hf_rocm.weights.mmap_pages import is_mapped
from tests.weights import models
from tests.weights.models import GROUPS, IDS, assert_matches_stock, blocks, live, logits

GATE = ("gate_proj", "up_proj")


def pending(model) -> int:
    return sum(is_idle(module.__dict__.get(SLOT), PENDING) for module in model.modules())


def addresses(model):
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_loading_reads_nothing_and_the_first_call_fuses(fresh, stock):
    assert pending(fresh) == GROUPS and blocks(fresh) == 0
    assert all(is_mapped(layer.mlp.up_proj.weight) for layer in fresh.model.layers)
    assert len(fresh.__dict__[preparing.REPORT]["fused"]) == GROUPS
    with torch.no_grad():
        assert why_not(fresh.model.layers[0].mlp, GATE) is None
    # Reading the reason did not fuse anything.
    assert pending(fresh) == GROUPS
    assert_matches_stock(fresh, GROUPS, twin=stock)
    assert blocks(fresh) == GROUPS


def test_preparing_again_keeps_groups_pending_and_restoring_keeps_the_mapped_file(fresh, stock):
    before = addresses(fresh)
    hf_rocm.prepare(fresh, force=True)
    assert pending(fresh) == GROUPS and addresses(fresh) == before
    hf_rocm.restore(fresh)
    assert pending(fresh) == 0 and addresses(fresh) == before
    assert torch.equal(logits(fresh), logits(stock))


@pytest.mark.parametrize("assign", [False, True])
def test_a_load_before_the_first_call_takes_effect(fresh, assign):
    other = {name: torch.randn_like(tensor) * 0.1 for name, tensor in fresh.state_dict().items()}
    fresh.load_state_dict(other, assign=assign)
    del other
    assert_matches_stock(fresh, GROUPS)


def test_writes_to_a_kept_state_dict_reach_the_model(fresh):
    kept = fresh.state_dict()
    logits(fresh)
    assert blocks(fresh) == 0
    with torch.no_grad():
        assert "a state dict in use?" in why_not(fresh.model.layers[0].mlp, GATE)
    kept["model.layers.0.mlp.up_proj.weight"].mul_(2)
    kept["model.layers.1.self_attn.q_proj.weight"].mul_(3)
    twin = models.build()
    twin.model.layers[0].mlp.up_proj.weight.data.mul_(2)
    twin.model.layers[1].self_attn.q_proj.weight.data.mul_(3)
    torch.testing.assert_close(logits(fresh), logits(twin))
    del kept
    assert_matches_stock(fresh, GROUPS, twin=twin)


def test_calls_with_gradients_keep_groups_pending(fresh, stock):
    for entry in (fresh, stock):
        entry(IDS, labels=IDS, use_cache=False).loss.backward()
    assert pending(fresh) == GROUPS
    assert "gradients are enabled" in why_not(fresh.model.layers[0].mlp, GATE)
    for (name, one), other in zip(fresh.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
    assert_matches_stock(fresh, GROUPS)


def test_a_hook_or_a_replaced_layer_keeps_its_group_pending_until_it_is_removed(fresh):
    mlp, seen = fresh.model.layers[0].mlp, []
    handle = mlp.gate_proj.register_forward_hook(lambda *call: seen.append(call))
    gate, mlp.gate_proj = mlp.gate_proj, nn.Sequential(mlp.gate_proj)
    twin = models.build()
    torch.testing.assert_close(logits(fresh), logits(twin))
    assert live(fresh) == GROUPS - 1 and seen
    mlp.gate_proj = gate
    handle.remove()
    assert_matches_stock(fresh, GROUPS, twin=twin)


def test_moving_to_the_same_device_reads_nothing_and_converting_fuses(fresh):
    before = addresses(fresh)
    fresh.to("cpu").eval()
    assert pending(fresh) == GROUPS and addresses(fresh) == before
    fresh.bfloat16()
    assert blocks(fresh) == GROUPS
    assert_matches_stock(fresh, GROUPS)


def test_a_conversion_while_loading_leaves_nothing_mapped_and_fuses_at_once(checkpoint):
    model = hf_rocm.from_pretrained(checkpoint, force=True, dtype=torch.float64)
    assert blocks(model) == GROUPS


def test_a_model_that_only_runs_compiled_is_fused_after_a_call(fresh, stock):
    torch._dynamo.reset()
    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool).tril()
    counter = CompileCounterWithBackend("eager")
    run = torch.compile(lambda: fresh(IDS, attention_mask=mask, use_cache=False).logits, backend=counter)
    with torch.no_grad():
        torch.testing.assert_close(run(), logits(stock))
        assert pending(fresh) == GROUPS
        assert_matches_stock(fresh, GROUPS)
        torch.testing.assert_close(run(), logits(stock))
    targets = [str(node.target) for node in counter.graphs[-1].graph.nodes]
    assert targets.count("hf_rocm.linear_group") == GROUPS
    torch._dynamo.reset()


def test_without_a_page_map_groups_are_fused_while_loading(checkpoint, monkeypatch):
    monkeypatch.setattr(mmap_pages, "_PAGEMAP", "/nowhere")
    fresh = hf_rocm.from_pretrained(checkpoint, force=True)
    assert blocks(fresh) == GROUPS
    assert_matches_stock(fresh, GROUPS)


@pytest.mark.parametrize("location", ["a mapped file", "memory"])
def test_on_rocm_weights_on_the_cpu_stay_pending_until_a_move_to_a_gpu(checkpoint, monkeypatch, location):
    monkeypatch.setattr(preparing, "is_rocm", lambda: True)
    monkeypatch.delenv("HF_ROCM_FORCE", raising=False)
    model = hf_rocm.from_pretrained(checkpoint) if location == "a mapped file" else hf_rocm.prepare(models.build())
    assert bind.mode_of(model.model.layers[0].mlp) == bind.GPU
    model.eval().half().float()
    logits(model)
    assert live(model) == blocks(model) == 0 and pending(model) == GROUPS
    with torch.no_grad():
        assert "moving the model to a GPU fuses its layers" in why_not(model.model.layers[0].mlp, GATE)
