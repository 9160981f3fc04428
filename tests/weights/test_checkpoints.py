"""Layouts of real checkpoints, saved by this release: results of stock and hf_rocm agree, and fused GEMMs run."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers

import hf_rocm
from hf_rocm import layers, ops, overlay
from hf_rocm.loading import prepare as preparing
from hf_rocm.overlay import bind
from tests.tolerance import assert_as_good_as_eager
from tests.weights.models import assert_same_results, logits

SHARED: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
BIASED = {"attention_bias": True, "mlp_bias": True}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 3,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
ATTENTION, GATE_UP = ["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]

# name → class, changes to SHARED, and for some modules the fused layers with their total number of rows
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, tuple[list[str], int]]]] = {
    "grouped": (
        "Llama",
        {},
        {"model.layers.1.self_attn": (ATTENTION, 128), "model.layers.0.mlp": (GATE_UP, 160)},
    ),
    "biases": (
        "Llama",
        BIASED,
        {"model.layers.1.self_attn": (ATTENTION, 128), "model.layers.0.mlp": (GATE_UP, 160)},
    ),
    "all heads": ("Llama", {"num_key_value_heads": 4}, {"model.layers.0.self_attn": (ATTENTION, 192)}),
    "one key head": ("Llama", {"num_key_value_heads": 1}, {"model.layers.0.self_attn": (ATTENTION, 96)}),
    "tied embeddings": ("Llama", {"tie_word_embeddings": True}, {"model.layers.0.mlp": (GATE_UP, 160)}),
    "biases of q, k and v alone": ("Qwen2", {}, {"model.layers.0.self_attn": (ATTENTION, 128)}),
    "a shared expert": (
        "Qwen2Moe",
        {**MOE, "shared_expert_intermediate_size": 72},
        {"model.layers.1.mlp.shared_expert": (GATE_UP, 144)},
    ),
    "shared experts": (
        "DeepseekV3",
        DEEPSEEK,
        {"model.layers.0.mlp": (GATE_UP, 160), "model.layers.1.mlp.shared_experts": (GATE_UP, 192)},
    ),
}
MLPS = {"Qwen2Moe": "Qwen2MoeMLP", "DeepseekV3": "DeepseekV3MLP"}


@pytest.fixture(params=[None, "40KB"], ids=["one file", "sharded"])
def saved(request, tmp_path):
    """Return a function that saves a model of a layout.

    The model's weights are large enough that every part affects the output.
    """

    def save(name: str) -> Any:
        kind, changes, _ = LAYOUTS[name]
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**{**SHARED, **changes})
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                # Norms and biases: keep the mean and add noise.
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                else:
                    parameter.normal_(0, 0.15)
        model.tie_weights()
        model.save_pretrained(tmp_path, **({"max_shard_size": request.param} if request.param else {}))
        assert (len(list(tmp_path.glob("*.safetensors"))) > 1) is (request.param is not None)
        return tmp_path

    return save


@pytest.fixture
def gated():
    """Returns a function that binds a family's MLP as an overlay does, if no overlay has bound it."""
    bound = []

    def serve(kind: str) -> None:
        if kind in MLPS:
            module = inspect.getmodule(getattr(transformers, f"{kind}ForCausalLM"))
            cls = getattr(module, MLPS[kind])
            if cls not in {binding.cls for binding in bind.bindings()}:
                overlay.binds(cls, layers.GatedMLP())
                bound.append(cls)

    yield serve
    for binding in list(bind.bindings()):
        if binding.cls in bound and isinstance(binding.layer, layers.GatedMLP):
            bind.unbind(binding.cls)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_of_a_checkpoint_is_loaded_as_in_stock(name, saved, gated):
    kind, _, fused = LAYOUTS[name]
    folder, stock_class = saved(name), getattr(transformers, f"{kind}ForCausalLM")
    gated(kind)
    prepared = hf_rocm.from_pretrained(folder, force=True).eval()
    stock = stock_class.from_pretrained(folder).eval()
    before = {name: tensor.clone() for name, tensor in stock.state_dict().items()}
    eager = logits(stock)
    with ops.recording() as routes:
        actual = logits(prepared)
    # Not every release runs these mixture-of-experts models in float64.
    if kind in MLPS:
        torch.testing.assert_close(actual, eager)
    else:
        assert_as_good_as_eager(actual, eager, logits(stock_class.from_pretrained(folder).eval().double()))
    report = prepared.__dict__[preparing.REPORT]
    rows = [route.shapes[1][0] for route in routes if route.operation == "linear"]
    for path, (names, total) in fused.items():
        assert report["fused"][path] == names
        assert total in rows
    assert not report["skipped"] and not report["refused"]
    after = prepared.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], tensor) for name, tensor in before.items())
    del after
    restored = hf_rocm.restore(prepared)
    assert_same_results(restored, stock)


def test_tied_embeddings_stay_tied(saved):
    model = hf_rocm.from_pretrained(saved("tied embeddings"), force=True).eval()
    expected = logits(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert not torch.allclose(logits(model), expected)
    assert hf_rocm.restore(model).lm_head.weight is model.model.embed_tokens.weight
