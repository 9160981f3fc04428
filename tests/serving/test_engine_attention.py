"""Overlays, like stock, use the attention and layers that an engine such as vLLM inserts into transformers' models."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import transformers
from torch import nn

import hf_rocm
from hf_rocm import ops
from hf_rocm.layers.fallback_reasons import noted
from hf_rocm.overlay import bind
from tests.generation.conftest import make
from tests.tolerance import assert_as_good_as_eager

KINDS = {
    "llama": "LlamaAttention",
    "qwen3": "Qwen3Attention",
    "mistral": "MistralAttention",
    "gemma2": "Gemma2Attention",
    "mixtral": "MixtralAttention",
}

# Arguments that stock layers in 4.x pass to the attention function as False by default. No function reads them.
UNREAD = {"use_cache", "output_router_logits"}


@pytest.fixture
def engine(monkeypatch):
    """Register an attention function under a new name. Returns its calls: (module, tensors, mask, arguments)."""
    calls = []

    def forward(module, query, key, value, attention_mask, scaling=None, **arguments):
        calls.append((module, (query, key, value), attention_mask, {"scaling": scaling, **arguments}))
        repeated = [heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1) for heads in (key, value)]
        output = nn.functional.scaled_dot_product_attention(query, *repeated, is_causal=True, scale=scaling)
        return output.transpose(1, 2).contiguous(), None

    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(functions._global_mapping, "engine", forward)
    return calls


def run(model, calls, **arguments):
    """Call the model as vLLM does, with arguments for its attention. Returns the logits and the attention's calls."""
    del calls[:]
    ids = torch.arange(3, 17).view(1, 14)
    with torch.inference_mode():
        output = model(
            input_ids=ids, position_ids=torch.arange(14)[None], use_cache=False, return_dict=False, **arguments
        )
    return output[0], list(calls)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delivery", ["prepared", "overlays"])
def test_engine_attention_is_called_as_stock_calls_it(kind, delivery, engine, monkeypatch):
    stock = make(kind, attn_implementation="engine")
    prepared = copy.deepcopy(stock)
    instances = {index: object() for index in range(stock.config.num_hidden_layers)}
    expected, stock_calls = run(stock, engine, attention_instances=instances)
    exact, _ = run(in_float64(copy.deepcopy(stock)), engine, attention_instances=instances)

    if delivery == "prepared":
        hf_rocm.prepare(prepared, force=True)
    else:
        monkeypatch.setenv("HF_ROCM_FORCE", "1")
        hf_rocm.activate(kind)
    try:
        with ops.recording() as routes:
            actual, calls = run(prepared, engine, attention_instances=instances)
    finally:
        if delivery == "overlays":
            hf_rocm.deactivate()

    assert len(calls) == len(stock_calls) == stock.config.num_hidden_layers
    for (module, tensors, mask, arguments), (_, stock_tensors, stock_mask, stock_arguments) in zip(
        calls, stock_calls, strict=True
    ):
        assert type(module).__name__ == KINDS[kind] and module in set(prepared.modules())
        # Keys aren't expanded.
        assert [tensor.shape for tensor in tensors] == [tensor.shape for tensor in stock_tensors]
        assert same(mask, stock_mask) and arguments.keys() <= stock_arguments.keys()
        assert all(same(value, stock_arguments[name]) for name, value in arguments.items())
        left_out = {name: stock_arguments[name] for name in stock_arguments.keys() - arguments.keys()}
        assert left_out.keys() <= UNREAD and not any(left_out.values())
        assert arguments["attention_instances"] is instances
        assert delivery == "overlays" or noted(module) == (
            "the attention implementation 'engine' is selected, but only 'sdpa' is served"
        )
    assert_as_good_as_eager(actual, expected, exact)
    ran = Counter(route.operation for route in routes)
    assert not ran.keys() & {"attention", "decode_attention", "varlen_attention"}
    # The rest of the layer runs hf_rocm's operations.
    assert ran["rms_norm"] + ran["add_rms_norm"] >= 2 * len(calls)


def in_float64(model):
    if hasattr(model, "set_experts_implementation"):
        # PyTorch's grouped GEMM doesn't support float64.
        model.set_experts_implementation("eager")
    return model.double()


def same(one, other):
    return torch.equal(one, other) if torch.is_tensor(one) else one is other or one == other


class EngineLinear(nn.Module):
    """A linear layer that is not an `nn.Linear`, like an engine's parallel and quantised layers."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.calls = linear.weight, 0

    def forward(self, x):
        self.calls += 1
        return nn.functional.linear(x, self.weight)


class EngineNorm(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps, self.calls = norm.weight, norm.variance_epsilon, 0

    def forward(self, x):
        self.calls += 1
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def equip(model):
    """Replace every linear layer and every norm, as vLLM does before it loads weights. Returns the new modules."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, EngineLinear(child))
            elif hasattr(child, "variance_epsilon"):
                setattr(module, name, EngineNorm(child))
    return [module for module in model.modules() if isinstance(module, (EngineLinear, EngineNorm))]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_engine_layers_run_within_overlays(kind, compiled, engine, monkeypatch):
    """Parts that an engine replaced run as often as in stock transformers. The compiled model has no graph breaks."""
    stock = make(kind, attn_implementation="engine")
    prepared = copy.deepcopy(stock)
    equipped = [equip(stock), equip(prepared)]
    expected, _ = run(stock, engine)
    monkeypatch.setenv("HF_ROCM_FORCE", "1")
    hf_rocm.activate(kind)
    try:
        assert any(bind.mode_of(module) == bind.ON for module in prepared.modules())
        call = torch.compile(prepared, fullgraph=True, backend="eager") if compiled else prepared
        actual, _ = run(call, engine)
    finally:
        hf_rocm.deactivate()
        torch.compiler.reset()
    torch.testing.assert_close(actual, expected)
    counts = [[module.calls for module in modules] for modules in equipped]
    assert counts[0] == [1] * len(counts[0]) and counts[1] == counts[0]
