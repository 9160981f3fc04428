"""Decoder layers: fusion into the GEMMs for few rows, fused sums and norms for many, and modules that users changed."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import hf_rocm
from hf_rocm import ops
from hf_rocm.layers import decoder, norm

SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LAYERS = 2
TOKENS = torch.randint(3, 131, (1, 5), generator=torch.Generator().manual_seed(1))
FUSED = "fused_linear"
PARTS = {
    "self_attn": "self_attn",
    "mlp": "mlp",
    "first norm": "input_layernorm",
    "second norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "o_proj": "self_attn.o_proj",
    "down_proj": "mlp.down_proj",
    "act_fn": "mlp.act_fn",
}


def build(name: str) -> Any:
    # Older releases ignore softcaps with sdpa.
    further = {"attn_logit_softcapping": None} if name == "Gemma2" else {}
    config = getattr(transformers, f"{name}Config")(**SMALL, **further)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.requires_grad_(False)


@pytest.fixture(scope="module", params=["Llama", "Gemma2", "Qwen3"])
def every_pair(request):
    model = build(request.param)
    return model, hf_rocm.prepare(copy.deepcopy(model), force=True)


@pytest.fixture
def pair():
    model = build("Llama")
    return model, hf_rocm.prepare(copy.deepcopy(model), force=True)


@pytest.fixture
def few(monkeypatch):
    """Simulate a GPU whose GEMMs include norms and residual sums. On the CPU, the parts run one by one."""
    monkeypatch.setattr(decoder, "can_fuse", lambda x: True)


@torch.no_grad()
def run(model: Any, **arguments: Any) -> tuple[Any, list[str]]:
    """Returns the model's output, with the results of all layers as `layers`, and the operations that ran."""
    returned: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda module, args, output: returned.append(_hidden(output)))
        for layer in model.model.layers
    ]
    with ops.recording() as routes:
        output = model(TOKENS, use_cache=False, **arguments)
    for hook in hooks:
        hook.remove()
    return SimpleNamespace(logits=output.logits, layers=returned, attentions=output.attentions), [
        route.operation for route in routes
    ]


def _hidden(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def assert_same(actual: Any, stock: Any) -> None:
    """Compare the logits and the outputs of all layers. Sums may be computed in a different order."""
    assert len(actual.layers) == len(stock.layers) == LAYERS
    for result, reference in zip((actual.logits, *actual.layers), (stock.logits, *stock.layers), strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-4, atol=1e-4)


def test_few_rows_run_one_gemm_per_part(every_pair, few):
    stock, actual = every_pair
    output, routes = run(actual)
    assert_same(output, run(stock)[0])
    assert routes.count(FUSED) == 4 * LAYERS


def test_few_rows_and_many_rows_are_bitwise_equal(every_pair, monkeypatch):
    _, actual = every_pair
    many, routes = run(actual)
    assert FUSED not in routes
    monkeypatch.setattr(decoder, "can_fuse", lambda x: True)
    together, routes = run(actual)
    assert FUSED in routes
    assert all(map(torch.equal, together.layers, many.layers))


def test_with_many_rows_the_residual_sum_and_the_second_norm_are_fused(every_pair):
    stock, actual = every_pair
    output, routes = run(actual)
    assert_same(output, run(stock)[0])
    assert routes.count("add_rms_norm") == LAYERS


def test_norms_after_the_branches_are_one_operation_with_the_sum(few, monkeypatch):
    model = build("Gemma2")
    actual = hf_rocm.prepare(copy.deepcopy(model), force=True)
    separate, routes = run(actual)
    assert "norm_add" not in routes
    monkeypatch.setattr(decoder, "one_kernel", lambda *norms: True)
    together, routes = run(actual)
    assert routes.count("norm_add") == 2 * LAYERS
    assert all(map(torch.equal, together.layers, separate.layers))


@pytest.mark.parametrize(
    ("part", "operations"),
    [("post_attention_layernorm", 1), ("pre_feedforward_layernorm", 2), ("post_feedforward_layernorm", 1)],
)
def test_a_hooked_norm_is_called_once_outside_the_fused_operation(few, part, operations, monkeypatch):
    """operations: the number of `norm_add` calls that remain in the layer whose norm has a hook."""
    monkeypatch.setattr(decoder, "one_kernel", lambda *norms: True)
    model = build("Gemma2")
    pair = model, hf_rocm.prepare(copy.deepcopy(model), force=True)
    outputs = []
    for variant in pair:
        calls: list[int] = []
        variant.model.layers[0].get_submodule(part).register_forward_hook(
            lambda module, args, output, calls=calls: _changed(output, calls)
        )
        outputs.append(run(variant))
        assert calls == [1]
    assert_same(outputs[1][0], outputs[0][0])
    assert outputs[1][1].count("norm_add") == operations + 2 * (LAYERS - 1)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("change", ["hook", "forward"])
def test_a_changed_module_takes_effect(pair, few, part, change):
    """If a part of the first layer is changed, the part is called once, and its result is used."""
    outputs = []
    for model in pair:
        calls: list[int] = []
        module = model.model.layers[0].get_submodule(PARTS[part])
        if change == "hook":
            module.register_forward_hook(lambda module, args, output, calls=calls: _changed(output, calls))
        else:
            stock = module.forward
            module.forward = lambda *args, stock=stock, calls=calls, **kwargs: _changed(stock(*args, **kwargs), calls)
        outputs.append(run(model)[0])
        assert calls == [1]
    assert_same(outputs[1], outputs[0])


def _changed(output: Any, calls: list[int]) -> Any:
    calls.append(1)
    return (output[0] * 1.5, *output[1:]) if isinstance(output, tuple) else output * 1.5


@pytest.mark.parametrize("name", ["self_attn.o_proj", "mlp.down_proj"])
def test_a_wrapped_projection_is_called(pair, few, name):
    """Adapters wrap projections in modules like `Wrapped`."""

    class Wrapped(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + 0.25 * x.mean(-1, keepdim=True)

    for model in pair:
        for layer in model.model.layers:
            layer.set_submodule(name, Wrapped(layer.get_submodule(name)))
    output, routes = run(pair[1])
    assert_same(output, run(pair[0])[0])
    assert routes.count(FUSED) == 3 * LAYERS


def test_hooks_on_all_modules_are_called_for_every_module(pair, few):
    seen: list[list[str]] = []
    for model in pair:
        names: list[str] = []
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, output, names=names: names.append(type(module).__name__)
        )
        try:
            routes = run(model)[1]
        finally:
            handle.remove()
        seen.append(names)
    assert FUSED not in routes
    assert seen[0] == seen[1]


def test_attention_weights_equal_stock(pair, few):
    for model in pair:
        model.config._attn_implementation = "eager"
    actual, expected = (run(model, output_attentions=True)[0] for model in reversed(pair))
    assert_same(actual, expected)
    assert len(actual.attentions) == LAYERS
    torch.testing.assert_close(actual.attentions, expected.attentions, rtol=1e-4, atol=1e-4)


def test_a_single_layer_is_called_like_its_stock_forward(pair, few):
    x = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(2))
    positions = torch.arange(3)[None]
    results = []
    for model in pair:
        angles = model.model.rotary_emb(x, positions)
        with torch.no_grad():
            results.append(model.model.layers[0](x, None, positions, position_embeddings=angles))
    assert type(results[0]) is type(results[1])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


def test_generation_with_a_cache_equals_stock(every_pair, few):
    stock, actual = every_pair
    arguments: dict[str, Any] = {"min_new_tokens": 12, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with ops.recording() as routes:
        output = actual.generate(TOKENS, **arguments)
    assert torch.equal(output, stock.generate(TOKENS, **arguments))
    assert sum(route.operation == FUSED for route in routes) == 4 * LAYERS * 12


def test_gradients_equal_those_of_separate_layers(pair, few):
    gradients = []
    for model in pair:
        model.requires_grad_(True).train()
        for layer in model.model.layers:
            layer.gradient_checkpointing, layer._gradient_checkpointing_func = (
                True,
                partial(checkpoint, use_reentrant=False),
            )
        model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-5)


def test_a_restored_model_is_stock(pair, few):
    stock, actual = pair
    output, routes = run(hf_rocm.restore(actual))
    assert routes == []
    assert torch.equal(output.logits, run(stock)[0].logits)


def test_nothing_is_fused_on_a_cpu_or_with_gradients():
    x = torch.randn(1, 1, 64)
    # Gradients are enabled.
    assert not norm.can_fuse(x)
    with torch.no_grad():
        assert not norm.can_fuse(x)
