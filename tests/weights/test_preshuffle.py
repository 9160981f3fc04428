"""Shuffling the weights of a model as copies and in place, the weights that are not shuffled, and `restore`."""

from __future__ import annotations

import copy
import gc
import json

import pytest
import torch
from torch import nn

import hf_rocm
from hf_rocm import ops
from hf_rocm.errors import OptionError
from hf_rocm.layers.weight_group import PENDING, SLOT, is_idle
from hf_rocm.weights import shuffled_copy
from hf_rocm.weights.fuse import Fused
from hf_rocm.weights.shuffled_parameter import ShuffledWeight
from tests.weights import models
from tests.weights.models import IDS, LAYERS, assert_same_results, logits
from tests.weights.shuffling import (
    GEMMS,
    NEWEST,
    ROWS,
    account,
    assert_shuffled_gemms,
    build,
    forwards,
    prepared,
    traces,
)


def test_every_gemm_reads_shuffled_weights(shuffled_model):
    assert_shuffled_gemms(shuffled_model, shuffled=GEMMS)


def test_copies_stay_within_the_budget_and_serve_many_rows_only(machine):
    machine()
    model = prepared()
    account_of_model = account(model)
    assert account_of_model == json.loads(json.dumps(account_of_model))
    assert (
        account_of_model["bytes"]
        == sum(p.nbytes for p in model.parameters() if p.ndim == 2) - model.lm_head.weight.nbytes
    )
    assert set(account_of_model["shuffled"].values()) == {"a copy"}
    assert_shuffled_gemms(model, shuffled=GEMMS)
    # Unfused layers run in PyTorch, as without copies.
    assert_shuffled_gemms(model, shuffled=0, plain=2 * LAYERS, ids=IDS[:, :3])


def test_shuffling_in_place_needs_no_memory_and_serves_any_number_of_rows(machine):
    machine(threshold=0)
    stock = build()
    before = {name: (id(p), p.nbytes) for name, p in stock.named_parameters()}
    model = hf_rocm.prepare(stock, force=True, preshuffle="all")
    assert account(model)["bytes"] == 0 and set(account(model)["shuffled"].values()) == {"in place of the original"}
    weights = [module.weight for module in model.modules() if type(module) is nn.Linear]
    assert all(type(weight) is ShuffledWeight and isinstance(weight, nn.Parameter) for weight in weights)
    assert all(weight.original.nbytes == 0 for weight in weights)
    assert_shuffled_gemms(model, shuffled=GEMMS)
    assert_shuffled_gemms(model, shuffled=GEMMS, ids=IDS[:1, :1])
    assert model.num_parameters() == sum(p.numel() for p in build().parameters())
    assert all(type(module.weight) is ShuffledWeight for module in model.modules() if type(module) is nn.Linear)
    hf_rocm.restore(model)
    assert {name: (id(p), p.nbytes) for name, p in model.named_parameters()} == before


def test_restore_returns_the_stock_model(shuffled_model):
    expected = build()
    for _ in range(2):
        assert hf_rocm.restore(shuffled_model) is shuffled_model
        # This frees the models of earlier tests, whose copies are also tracked.
        gc.collect()
        shuffled_copy.unwatch()
        assert not traces(shuffled_model) and not shuffled_copy._hook.live
        state = shuffled_model.state_dict()
        assert list(state) == list(expected.state_dict())
        assert all(torch.equal(tensor, state[name]) for name, tensor in expected.state_dict().items())
        assert all(type(parameter) is nn.Parameter for parameter in shuffled_model.parameters())
        assert_same_results(shuffled_model, expected)


def only_fused(model):
    groups = [module.__dict__[SLOT] for module in model.modules() if SLOT in module.__dict__]
    return all((type(group) is Fused and group.copy is None) or is_idle(group, PENDING) for group in groups)


def test_preparing_twice_equals_preparing_once(shuffled_model):
    before = copy.deepcopy(account(shuffled_model))
    slots = {id(m): m.__dict__.get(SLOT) for m in shuffled_model.modules()}
    hf_rocm.prepare(shuffled_model, force=True, preshuffle="all", budget=1.0)
    assert account(shuffled_model) == before
    assert {id(m): m.__dict__.get(SLOT) for m in shuffled_model.modules()} == slots
    assert_shuffled_gemms(shuffled_model, shuffled=GEMMS)


def test_preparing_again_without_arguments_keeps_the_settings(shuffled_model):
    shuffled_model.load_state_dict(copy.deepcopy(shuffled_model).state_dict())
    shuffled_model.lm_head.weight = nn.Parameter(shuffled_model.lm_head.weight.data.clone())
    before = account(shuffled_model)
    hf_rocm.prepare(shuffled_model, force=True)
    assert account(shuffled_model) == before
    assert_shuffled_gemms(shuffled_model, shuffled=GEMMS)


def test_other_settings_replace_the_earlier_ones(shuffled_model):
    hf_rocm.prepare(shuffled_model, force=True, preshuffle="off")
    assert (
        not account(shuffled_model)["shuffled"]
        and forwards(shuffled_model) == ["lm_head"]
        and only_fused(shuffled_model)
    )
    assert_shuffled_gemms(shuffled_model, shuffled=0, plain=2 * LAYERS)


def test_explain_lists_shuffled_unshuffled_and_stale_weights(shuffled_model):
    in_place = account(shuffled_model)["threshold"] == 0
    text = hf_rocm.explain(shuffled_model).details()
    assert (f"shuffled in place: {GEMMS}" if in_place else f"shuffled: {GEMMS} as copies") in text
    assert "shuffled_linear (q_proj + k_proj + v_proj, 128 × 64): aiter, gemm_a16w16, shuffled" in text
    assert "shuffled_linear (96 × 64): aiter" in text
    shuffled_model.lm_head.weight = nn.Parameter(torch.zeros_like(shuffled_model.lm_head.weight.data))
    logits(shuffled_model)
    assert "no longer shuffled × 1" in hf_rocm.explain(shuffled_model).details()


def test_the_budget_is_not_exceeded_and_the_omitted_weights_are_listed(machine):
    machine()
    model = prepared(budget=20_000)
    done, left = account(model)["shuffled"], account(model)["skipped"]
    assert 0 < account(model)["bytes"] <= 20_000 and done and left
    assert any("bytes of the budget are left" in reason for reason in left.values())
    assert_shuffled_gemms(model, shuffled=len(done), plain=sum("+" in label for label in left))


@pytest.mark.parametrize(
    ("arch", "release", "threshold", "arguments", "reason"),
    [
        ("gfx90a", NEWEST, 8, {}, "gfx90a has no kernel for shuffled weights"),
        ("gfx942", "0.1.7.post2", 8, {}, "does not check whether a weight is shuffled"),
        ("gfx950", NEWEST, 8, {}, "N and K multiples of 64"),
        ("gfx942", NEWEST, 8, {"preshuffle": "auto"}, "no gain is known on gfx942"),
    ],
)
def test_weights_without_a_kernel_are_not_shuffled(machine, arch, release, threshold, arguments, reason):
    machine(arch, release, threshold)
    model = prepared(**arguments)
    assert any(reason in entry for entry in account(model)["skipped"].values())
    assert not [entry for entry in account(model)["shuffled"] if reason != "N and K multiples of 64"]


def test_auto_uses_the_table_of_known_gains(machine):
    machine("gfx950")
    model = hf_rocm.prepare(models.build(hidden_size=128, intermediate_size=128).bfloat16(), force=True, budget=1.0)
    assert account(model)["mode"] == "auto"
    assert "model.layers.0.mlp (gate_proj + up_proj)" in account(model)["shuffled"]
    assert "no gain" not in " ".join(account(model)["skipped"].values())


@pytest.mark.parametrize("threshold", [-1, ROWS])
def test_nothing_is_shuffled_without_a_budget_or_with_a_threshold_of_minus_one(machine, threshold):
    machine(threshold=threshold)
    model = prepared(budget=0 if threshold > 0 else 1.0)
    assert account(model)["shuffled"] == {} and account(model)["bytes"] == 0
    assert forwards(model) == ["lm_head"] and only_fused(model)


def test_tied_weights_inference_tensors_and_adapter_bases_are_not_shuffled(machine):
    machine()
    with torch.inference_mode():
        model = build(tie_word_embeddings=True)
    model = hf_rocm.prepare(model, force=True, preshuffle="all", budget=1.0)
    assert not account(model)["shuffled"]
    tied = hf_rocm.prepare(build(tie_word_embeddings=True), force=True, preshuffle="all", budget=1.0)
    assert "share memory" in account(tied)["skipped"]["lm_head"]
    assert len(account(tied)["shuffled"]) == GEMMS - 1
    wrapped = build()
    wrapped.lm_head = nn.ModuleDict({"base_layer": wrapped.lm_head})
    hf_rocm.prepare(wrapped, force=True, preshuffle="all", budget=1.0)
    assert "adapter" in account(wrapped)["skipped"]["lm_head.base_layer"]


def test_layers_with_biases_are_shuffled(machine):
    machine()
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 48, bias=False)).bfloat16()
    twin, x = copy.deepcopy(model), torch.randn(ROWS, 64).bfloat16()
    hf_rocm.prepare(model, force=True, preshuffle="all", budget="1 MiB")
    assert list(account(model)["shuffled"]) == ["0", "1"]
    with torch.no_grad(), ops.recording() as routes:
        torch.testing.assert_close(model(x), twin(x), rtol=0.02, atol=0.02)
    assert [route.name for route in routes] == ["gemm_a16w16, shuffled"] * 2
    model[0].bias.data = torch.zeros(64, dtype=torch.float32)
    with torch.no_grad(), pytest.raises(RuntimeError):
        model[0](x)


@pytest.mark.parametrize("arguments", [{"preshuffle": "some"}, {"budget": -1}, {"budget": True}, {"budget": 1.5}])
def test_arguments_are_checked_before_anything_is_loaded(arguments, tmp_path):
    with pytest.raises(OptionError, match="is not valid"):
        hf_rocm.prepare(nn.Linear(2, 2), **arguments)
    with pytest.raises(OptionError, match="is not valid"):
        hf_rocm.from_pretrained(tmp_path / "nothing", **arguments)
