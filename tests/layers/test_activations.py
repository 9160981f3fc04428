"""Activations that are not modules, such as functions set on a layer or by a config, run as in stock transformers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import activations

import hf_rocm
from hf_rocm import ops
from tests.generation.conftest import counted, generate, make, pair, prompt, recorded_on_cpu  # noqa: F401
from tests.tolerance import assert_as_good_as_eager
from tests.weights import models


class Counting:
    """An activation whose bound method counts its calls."""

    calls = 0

    def __call__(self, x):
        return self.act(x)

    def act(self, x):
        self.calls += 1
        return torch.tanh(x)


FUNCTIONS = {
    "a function of torch": lambda: F.silu,
    "a lambda": lambda: lambda x: torch.tanh(x) * 0.5,
    "a bound method": lambda: Counting().act,
    "an object": Counting,
}


def set_activation(model, function):
    for layer in model.model.layers:
        del layer.mlp.act_fn
        layer.mlp.act_fn = function


def linear_routes(model):
    with ops.recording() as routes:
        models.logits(model)
    return [route.name for route in routes if route.operation == "linear"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_set_on_a_module_is_called(name, dtype):
    stock = models.build().to(dtype)
    actual = models.prepared().to(dtype)
    actual.load_state_dict(stock.state_dict())
    before = linear_routes(actual)
    for model in (actual, stock):
        set_activation(model, FUNCTIONS[name]())
    expected = models.logits(stock)
    assert_as_good_as_eager(models.logits(actual), expected, models.logits(copy.deepcopy(stock).double()))
    # The GEMMs are still fused.
    assert linear_routes(actual) == before
    for model in (actual, stock):
        set_activation(model, torch.relu)
    assert not torch.allclose(models.logits(actual), expected, atol=0.05)


@pytest.mark.parametrize("joined", [False, True], ids=["gate and up", "joined"])
def test_a_function_set_by_a_config_is_called(joined, monkeypatch):
    import transformers

    monkeypatch.setitem(activations.ACT2FN, "beside", lambda: lambda x: torch.tanh(x) * 0.5)
    kind = "Phi3" if joined else "Llama"
    more = {"pad_token_id": 0} if joined else {}
    config = getattr(transformers, f"{kind}Config")(
        **models.build().config.to_diff_dict() | {"hidden_act": "beside", "model_type": kind.lower(), **more}
    )
    torch.manual_seed(0)
    stock = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    actual = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    expected = models.logits(stock)
    with ops.recording() as routes:
        actual = models.logits(actual)
    torch.testing.assert_close(actual, expected)
    assert any(route.operation == "rms_norm" for route in routes)


def test_experts_with_a_function_as_activation_stay_stock(recorded_on_cpu):  # noqa: F811
    stock = make("mixtral")
    actual = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    for model in (stock, actual):
        for module in model.modules():
            if "act_fn" in module._modules:
                del module.act_fn
                module.act_fn = torch.tanh
    inputs = prompt()
    with torch.no_grad(), ops.recording() as routes:
        torch.testing.assert_close(actual(**inputs).logits, stock(**inputs).logits)
    assert not any(route.operation == "experts" for route in routes)


def test_a_users_function_runs_in_every_decode_step(pair):  # noqa: F811
    actual, stock = pair(graphs=None)
    generate(actual)
    replayed = counted(actual)[1]
    assert replayed
    set_activation(actual, (actual_function := Counting()).act)
    set_activation(stock, (stock_function := Counting()).act)
    assert torch.equal(generate(actual), generate(stock))
    assert actual_function.calls == stock_function.calls and counted(actual)[1] == replayed


def test_a_torch_function_is_recorded(pair):  # noqa: F811
    actual, stock = pair()
    for model in (actual, stock):
        set_activation(model, F.gelu if hasattr(F.gelu, "__code__") else F.relu)
    assert torch.equal(generate(actual), generate(stock))
    assert counted(actual)[1] > 0
