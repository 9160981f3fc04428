"""prepare and restore on real models: effects, exceptions, reports and messages."""

from __future__ import annotations

import copy
import json
import logging
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

import hf_rocm
from hf_rocm import ops
from hf_rocm.errors import DigestMismatch, OptionError
from hf_rocm.layers.grouped_linear import live as fused
from hf_rocm.layers.weight_group import SLOT
from hf_rocm.loading import prepare as preparing
from hf_rocm.overlay import bind
from tests.weights import models
from tests.weights.models import GROUPS, IDS, assert_matches_stock, assert_same_results, live, logits


def report(model):
    return model.__dict__[preparing.REPORT]


def traces(model):
    return [name for module in model.modules() for name in module.__dict__ if "hf_rocm" in name]


def layout(model):
    """The visible properties of the weights' memory, except addresses."""
    return {
        name: (p.dtype, p.shape, p.stride(), p.storage_offset(), p.untyped_storage().nbytes(), type(p), p.requires_grad)
        for name, p in model.named_parameters()
    }


def test_prepare_fuses_every_group_and_its_report_has_builtin_types(stock):
    parameters = dict(stock.named_parameters())
    shape = layout(stock)
    assert hf_rocm.prepare(stock, force=True) is stock
    assert_matches_stock(stock, GROUPS)
    assert dict(stock.named_parameters()) == parameters and layout(stock) == shape
    assert all(parameter is parameters[name] for name, parameter in stock.named_parameters())
    written = json.loads(json.dumps(report(stock)))
    assert written == report(stock)
    assert written["overlays"] == ["llama"] and written["forced"] is True
    assert written["fused"]["model.layers.1.self_attn"] == ["q_proj", "k_proj", "v_proj"]
    assert len(written["fused"]) == GROUPS and not written["skipped"] and not written["refused"]


def test_preparing_twice_equals_preparing_once(model):
    slots = {id(module): module.__dict__.get(SLOT) for module in model.modules()}
    before = report(model)
    hf_rocm.prepare(model, force=True)
    assert {id(module): module.__dict__.get(SLOT) for module in model.modules()} == slots
    assert report(model) == before


@pytest.mark.parametrize("location", ["a mapped file", "memory"])
def test_restore_returns_the_stock_model(stock, location):
    stock = models.build() if location == "memory" else stock
    twin, state, shape = copy.deepcopy(stock), copy.deepcopy(stock.state_dict()), layout(stock)
    names = [(name, type(module)) for name, module in stock.named_modules()]
    ordinary = {name for name, p in stock.named_parameters() if p.untyped_storage().resizable()}
    dictionaries = {name: set(module.__dict__) for name, module in stock.named_modules()}
    prepared = hf_rocm.prepare(stock, force=True)
    models.logits(prepared)
    for _ in range(2):
        assert hf_rocm.restore(prepared) is prepared
        assert not traces(prepared) and layout(prepared) == shape
        assert ordinary <= {name for name, p in prepared.named_parameters() if p.untyped_storage().resizable()}
        assert [(name, type(module)) for name, module in prepared.named_modules()] == names
        assert {name: set(module.__dict__) for name, module in prepared.named_modules()} == dictionaries
        assert list(prepared.state_dict()) == list(state)
        assert all(torch.equal(tensor, state[name]) for name, tensor in prepared.state_dict().items())
        assert_same_results(prepared, twin)
        assert all(bind.mode_of(module) == bind.OFF for module in prepared.modules())
    hf_rocm.prepare(prepared, force=True)
    assert_matches_stock(prepared, GROUPS)


def test_the_call_after_an_invalidation_frees_the_whole_block(model):
    mlp = model.model.layers[0].mlp
    mlp.gate_proj.weight.data = torch.randn_like(mlp.gate_proj.weight)
    assert not mlp.up_proj.weight.untyped_storage().resizable()
    parameter, value = mlp.up_proj.weight, mlp.up_proj.weight.clone()
    assert_matches_stock(model, GROUPS - 1)
    assert mlp.up_proj.weight is parameter and torch.equal(parameter, value)
    assert parameter.untyped_storage().resizable()
    hf_rocm.restore(model)
    assert not traces(model)


def test_a_stale_block_stays_while_a_part_is_aliased(model):
    mlp = model.model.layers[0].mlp
    kept = model.state_dict()["model.layers.0.mlp.up_proj.weight"]
    mlp.gate_proj.weight.data = torch.randn_like(mlp.gate_proj.weight)
    assert_matches_stock(model, GROUPS - 1)
    kept.zero_()
    assert not mlp.up_proj.weight.any()
    hf_rocm.restore(model)
    kept.fill_(1.0)
    assert mlp.up_proj.weight.all() and not traces(model)
    del kept
    hf_rocm.restore(hf_rocm.prepare(model, force=True))
    assert mlp.up_proj.weight.untyped_storage().resizable() and not traces(model)


def test_restore_switches_off_an_installed_overlay(model):
    bound = [binding for binding in bind.bindings() if binding.model == "llama"]
    for binding in bound:
        binding.mode = bind.ON
    try:
        hf_rocm.restore(model)
        assert {bind.mode_of(module) for module in model.modules()} == {bind.OFF}
    finally:
        for binding in bound:
            binding.mode = bind.OFF


def test_deactivate_restores_the_class_and_preparing_again_uses_moved_weights(model):
    mlp = type(model.model.layers[0].mlp)
    assert "_apply" in mlp.__dict__
    hf_rocm.deactivate("llama")
    assert "_apply" not in mlp.__dict__
    with ops.recording() as routes:
        models.logits(model)
    assert not routes
    hf_rocm.prepare(model.half().float(), force=True)
    assert "_apply" in mlp.__dict__
    assert_matches_stock(model, GROUPS)


def test_groups_with_biases_are_fused_in_bert():
    torch.manual_seed(0)
    bert = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=96, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4
        )
    ).eval()
    with torch.no_grad():
        for parameter in bert.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        expected = bert(IDS).last_hidden_state
        hf_rocm.prepare(bert, force=True)
        assert len(report(bert)["fused"]) == live(bert) == 2
        blocks = [fused(module) for module in bert.modules()]
        assert all(block.bias.shape == (192,) for block in blocks if block is not None)
        with ops.recording() as routes:
            actual = bert(IDS).last_hidden_state
    assert sum(route.operation == "linear" for route in routes) == 2
    torch.testing.assert_close(actual, expected)
    hf_rocm.restore(bert)
    with torch.no_grad():
        assert torch.equal(bert(IDS).last_hidden_state, expected)


def test_restore_works_after_outputs_were_captured(model):
    with torch.no_grad():
        model.config._attn_implementation = "eager"
        captured = model(IDS, output_attentions=True, output_hidden_states=True, use_cache=False)
        model.config._attn_implementation = "sdpa"
    assert captured.attentions[0] is not None and len(captured.hidden_states) == models.LAYERS + 1
    assert_matches_stock(model, GROUPS)
    hf_rocm.restore(model)
    assert_matches_stock(model, 0)
    assert_same_results(model, models.build())


def test_restore_keeps_the_users_hooks(model):
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, inputs, output: output * 2)
    expected = logits(model)
    assert live(model) == GROUPS - 1
    hf_rocm.restore(model)
    assert torch.allclose(logits(model), expected, atol=1e-5)
    assert not torch.allclose(logits(models.build()), expected, atol=1e-2)


def test_a_copy_and_its_original_are_restored_separately(model):
    twin = copy.deepcopy(model)
    hf_rocm.restore(twin)
    assert not traces(twin)
    assert_matches_stock(twin, 0)
    assert_matches_stock(model, GROUPS)
    hf_rocm.restore(model)
    assert_same_results(model, twin)


def test_without_rocm_the_model_stays_stock_and_one_line_is_logged(stock, caplog, monkeypatch):
    monkeypatch.setattr(preparing, "is_rocm", lambda: False)
    monkeypatch.delenv("HF_ROCM_FORCE", raising=False)
    with caplog.at_level(logging.WARNING, "hf_rocm"):
        assert hf_rocm.prepare(stock) is stock
    assert [record.getMessage() for record in caplog.records] == [
        "LlamaForCausalLM stays stock: this PyTorch is not a ROCm build "
        "(force=True or HF_ROCM_FORCE=1 prepares it anyway)"
    ]
    assert not traces(stock) and live(stock) == 0


@pytest.mark.parametrize("environment", ["0", "1"])
@pytest.mark.parametrize("rocm", [False, True])
def test_machine_environment_and_argument_decide_whether_a_model_is_prepared(stock, monkeypatch, environment, rocm):
    monkeypatch.setattr(preparing, "is_rocm", lambda: rocm)
    monkeypatch.setenv("HF_ROCM_FORCE", environment)
    assert not traces(hf_rocm.prepare(stock, force=False))
    hf_rocm.prepare(stock)
    served = [module for module in stock.modules() if type(module).__name__ in ("LlamaAttention", "LlamaMLP")]
    modes = {bind.mode_of(module) for module in served}
    assert modes == {bind.ON if environment == "1" else bind.GPU if rocm else bind.OFF}
    # Without force, blocks are not used on the CPU.
    assert live(stock) == (GROUPS if environment == "1" else 0)


def test_on_rocm_a_model_on_the_cpu_runs_the_stock_forward(stock, monkeypatch):
    monkeypatch.setattr(preparing, "is_rocm", lambda: True)
    monkeypatch.delenv("HF_ROCM_FORCE", raising=False)
    expected = logits(stock)
    assert torch.equal(logits(hf_rocm.prepare(stock)), expected)


def test_forcing_one_model_keeps_the_others_stock(model, stock):
    assert {bind.mode_of(module) for module in stock.modules()} == {bind.OFF}
    assert_matches_stock(stock, 0)


def test_an_overlay_that_does_not_match_is_reported_and_the_model_runs_stock(stock, monkeypatch):
    from hf_rocm.overlay import activate

    for binding in list(bind.bindings()):
        bind.unbind(binding.cls)

    def refuse(*names, everywhere, catalog):
        raise DigestMismatch("modeling_llama.py is not a file that this overlay was made for", hint="reinstall it")

    monkeypatch.setattr(activate, "activate", refuse)
    expected = logits(stock)
    hf_rocm.prepare(stock, force=True)
    assert report(stock)["refused"]["llama"].endswith("hint: reinstall it") and not report(stock)["fused"]
    assert torch.equal(logits(stock), expected)


def test_modules_of_other_packages_are_unchanged():
    module = nn.Sequential(nn.Linear(4, 4))
    hf_rocm.prepare(module, force=True)
    assert not any(report(module)[kind] for kind in ("overlays", "refused", "fused", "skipped"))
    hf_rocm.restore(module)
    assert not traces(module)


def test_an_object_that_is_not_a_model_is_refused():
    with pytest.raises(OptionError, match=r"a torch\.nn\.Module\s+found\s+object"):
        hf_rocm.prepare(object(), force=True)
    with pytest.raises(OptionError, match=r"pass the `\.model` of this SimpleNamespace"):
        hf_rocm.prepare(SimpleNamespace(model=nn.Linear(4, 4)), force=True)


def test_tied_quantised_and_absent_weights_are_listed_and_the_rest_is_fused(stock):
    class Linear4bit(nn.Linear):
        """A stand-in for a quantised layer."""

    first, second = stock.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    first.self_attn.k_proj.__class__ = Linear4bit
    expected = logits(stock)
    hf_rocm.prepare(stock, force=True)
    tied = "model.layers.0.mlp.up_proj.weight and model.layers.1.mlp.up_proj.weight share memory"
    assert report(stock)["skipped"]["model.layers.0.mlp"] == report(stock)["skipped"]["model.layers.1.mlp"] == tied
    assert "Linear4bit, not a plain nn.Linear" in report(stock)["skipped"]["model.layers.0.self_attn"]
    assert list(report(stock)["fused"]) == ["model.layers.1.self_attn"] and live(stock) == 1
    torch.testing.assert_close(logits(stock), expected)
    with torch.no_grad():
        first.mlp.up_proj.weight.mul_(2)
    assert second.mlp.up_proj.weight is first.mlp.up_proj.weight
    assert_matches_stock(stock, 1)


def test_a_model_on_meta_is_unchanged():
    with torch.device("meta"):
        model = models.build()
    hf_rocm.prepare(model, force=True)
    assert set(report(model)["skipped"].values()) == {
        "q_proj has a weight that is on the meta device",
        "gate_proj has a weight that is on the meta device",
    }
    assert len(report(model)["skipped"]) == GROUPS


def test_prepare_quantises_as_from_pretrained_does(stock):
    before = copy.deepcopy(stock)
    with pytest.raises(OptionError, match="no kind 'fp4'"):
        hf_rocm.prepare(stock, force=True, quantize="fp4")
    with pytest.raises(OptionError, match="force=False"):
        hf_rocm.prepare(stock, force=False, quantize="int8")
    assert traces(stock) == []
    hf_rocm.prepare(stock, force=True, quantize="int8")
    expected = hf_rocm.quantize(hf_rocm.prepare(before, force=True), "int8", force=True)
    assert torch.equal(logits(stock), logits(expected))
    assert hf_rocm.explain(stock).quantized is not None
