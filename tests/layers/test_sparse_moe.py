"""Sparse MLPs in layers with few rows: the operation of the experts includes the residual sum."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import hf_rocm
from hf_rocm.layers import decoder, experts
from tests.layers.test_decoder import LAYERS, SMALL, assert_same, run

pytest.importorskip("transformers.integrations.moe", reason="not run: this transformers has no experts interface")

ROUTERS = {"Qwen3Moe": "gate", "Olmoe": "gate", "GptOss": "router"}
SIZES: dict[str, Any] = {
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "intermediate_size": 48,
    "tie_word_embeddings": False,
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**{**SMALL, **SIZES}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval().requires_grad_(False)


@pytest.fixture(params=ROUTERS)
def pair(request):
    model = build(request.param)
    return request.param, model, hf_rocm.prepare(copy.deepcopy(model), force=True)


@pytest.fixture
def few(monkeypatch):
    """Simulate a GPU whose kernels include norms and residual sums. On the CPU, the parts run one by one."""
    monkeypatch.setattr(decoder, "can_fuse", lambda x: True)
    monkeypatch.setattr(experts, "one_sum", lambda *tensors, **terms: True)


def test_the_experts_include_the_residual_sum(pair, few):
    _, stock, actual = pair
    output, routes = run(actual)
    assert_same(output, run(stock)[0])
    assert routes.count("experts_add") == LAYERS and "experts" not in routes


def test_without_a_kernel_the_sum_is_separate(pair, few, monkeypatch):
    _, stock, actual = pair
    together, _ = run(actual)
    monkeypatch.setattr(experts, "one_sum", lambda *tensors, **terms: False)
    output, routes = run(actual)
    assert_same(output, run(stock)[0])
    assert_same(output, together)
    assert routes.count("experts") == LAYERS and "experts_add" not in routes


def test_with_many_rows_nothing_is_included(pair):
    _, stock, actual = pair
    output, routes = run(actual)
    assert_same(output, run(stock)[0])
    assert routes.count("experts") == LAYERS and "experts_add" not in routes


@pytest.mark.parametrize("part", ["mlp", "experts", "router"])
@pytest.mark.parametrize("change", ["hook", "forward"])
def test_a_changed_module_takes_effect(pair, few, part, change):
    """If a part of the first layer is changed, it is called once, and its result is used."""
    name, *models = pair
    path = {"mlp": "mlp", "experts": "mlp.experts", "router": f"mlp.{ROUTERS[name]}"}[part]
    outputs, routes = [], []
    for model in models:
        calls: list[int] = []
        module = model.model.layers[0].get_submodule(path)
        if change == "hook":
            module.register_forward_hook(lambda module, args, output, calls=calls: _changed(output, calls))
        else:
            stock = module.forward
            module.forward = lambda *args, stock=stock, calls=calls, **kwargs: _changed(stock(*args, **kwargs), calls)
        output, routes = run(model)
        outputs.append(output)
        assert calls == [1]
    assert_same(outputs[1], outputs[0])
    # A router is called in any case, so a change of it prevents nothing.
    assert routes.count("experts_add") == (LAYERS if part == "router" else LAYERS - 1)


def _changed(output: Any, calls: list[int]) -> Any:
    """The output with its first tensor of floats, in this order, multiplied by 1.5."""
    calls.append(1)
    if not isinstance(output, tuple):
        return output * 1.5
    first, *rest = output
    return (first * 1.5, *(value * 1.5 if value.is_floating_point() else value for value in rest))


@pytest.mark.parametrize("part", ["experts", "router"])
@pytest.mark.parametrize("removed", [False, True])
def test_an_attribute_of_the_instance_takes_precedence(pair, few, part, removed):
    """As in stock, a function in the block's `__dict__` is called instead of the child, which may no longer exist."""
    name, *models = pair
    attribute = {"experts": "experts", "router": ROUTERS[name]}[part]
    outputs = []
    for model in models:
        calls: list[int] = []
        block = model.model.layers[0].mlp
        module = getattr(block, attribute)
        if removed:
            delattr(block, attribute)
        block.__dict__[attribute] = lambda *args, module=module, calls=calls: _changed(module(*args), calls)
        outputs.append(run(model)[0])
        assert calls == [1]
    assert_same(outputs[1], outputs[0])


def test_another_experts_implementation_stays_stock(pair, few):
    _, stock, actual = pair
    for model in (stock, actual):
        model.set_experts_implementation("eager")
    output, routes = run(actual)
    assert_same(output, run(stock)[0])
    assert "experts" not in routes and "experts_add" not in routes


def test_router_logits_equal_stock(pair, few):
    _, stock, actual = pair
    tokens = torch.arange(3, 9)[None]
    with torch.no_grad():
        expected, output = (model(tokens, output_router_logits=True, use_cache=False) for model in (stock, actual))
    assert len(output.router_logits) == LAYERS
    torch.testing.assert_close(output.router_logits, expected.router_logits, rtol=1e-4, atol=1e-4)


def test_a_restored_model_is_stock(pair, few):
    _, stock, actual = pair
    output, routes = run(hf_rocm.restore(actual))
    assert routes == []
    assert torch.equal(output.logits, run(stock)[0].logits)
