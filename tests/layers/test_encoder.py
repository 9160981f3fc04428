"""Layers of encoders: a residual sum and its LayerNorm are one operation, unless modules or PyTorch were changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as torch_module

import hf_rocm
from hf_rocm import ops, options
from hf_rocm.layers import encoder, mlp
from hf_rocm.layers.fallback_reasons import noted
from hf_rocm.options import Switch

LAYERS = 2
NAME = "add_layer_norm"
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
IMAGES = {"image_size": 32, "patch_size": 16}
TOKENS = torch.randint(3, 99, (2, 5), generator=torch.Generator().manual_seed(1))
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))

# name → the class, its config's arguments, and the number of operations in each layer
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "Bert": ("BertModel", {"vocab_size": 99, **SMALL}, 2),
    "Roberta": ("RobertaModel", {"vocab_size": 99, **SMALL}, 2),
    "MPNet": ("MPNetModel", {"vocab_size": 99, **SMALL}, 2),
    "DistilBert": ("DistilBertModel", {"vocab_size": 99, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4}, 2),
    "SiglipVision": ("SiglipVisionModel", {**SMALL, **IMAGES}, 1),
    "CLIPVision": ("CLIPVisionModel", {**SMALL, **IMAGES}, 1),
    "ViT": ("ViTModel", {**SMALL, **IMAGES}, 1),
    "Dinov2": ("Dinov2Model", {**SMALL, **IMAGES}, 1),
}


def build(family: str, **further: Any) -> Any:
    name, arguments, _ = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**arguments, **further)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def prepared(model: Any) -> Any:
    return hf_rocm.prepare(copy.deepcopy(model), force=True, graphs=False)


@pytest.fixture
def pair():
    model = build("Bert")
    return model, prepared(model)


def run(model: Any, **arguments: Any) -> tuple[Any, int]:
    """Returns the last hidden state, and the number of operations that computed a norm of a sum."""
    inputs = {"pixel_values": PIXELS} if hasattr(model.config, "image_size") else {"input_ids": TOKENS}
    with ops.recording() as routes:
        output = model(**inputs, **arguments)
    return output.last_hidden_state, sum(route.operation == NAME for route in routes)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_norm_of_a_sum_is_one_operation(family):
    stock = build(family)
    output, count = run(prepared(stock))
    assert count == FAMILIES[family][2] * LAYERS
    expected, stock_count = run(stock)
    assert stock_count == 0
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_attention_weights_equal_stock(family):
    stock = build(family, attn_implementation="eager")
    actual = prepared(stock)
    inputs = {"pixel_values": PIXELS} if hasattr(stock.config, "image_size") else {"input_ids": TOKENS}
    outputs = [model(**inputs, output_attentions=True, output_hidden_states=True) for model in (stock, actual)]
    assert outputs[0].keys() == outputs[1].keys()
    for name in ("attentions", "hidden_states"):
        stock_tensors, tensors = (output[name] for output in outputs)
        assert len(stock_tensors) == len(tensors) >= LAYERS
        for reference, tensor in zip(stock_tensors, tensors, strict=True):
            torch.testing.assert_close(reference, tensor, rtol=1e-5, atol=1e-5)


class Norm(nn.LayerNorm):
    """A user's own class."""


class Noise(nn.Dropout):
    def forward(self, input):
        return input + 1.0


def _hooked(name: str) -> Callable[[Any], list[str]]:
    def change(layer: Any) -> list[str]:
        seen: list[str] = []
        layer.output.get_submodule(name).register_forward_hook(lambda *_: seen.append(name))
        return seen

    return change


def _own_forward(layer: Any) -> list[str]:
    seen: list[str] = []
    norm = layer.output.LayerNorm
    forward = norm.forward
    norm.forward = lambda x: (seen.append("forward"), forward(x) * 2)[1]
    return seen


def _own_class(layer: Any) -> list[str]:
    layer.output.LayerNorm.__class__ = Norm
    return ["nothing to call"]


def _own_dropout(layer: Any) -> list[str]:
    layer.output.dropout = Noise(0.1)
    return ["nothing to call"]


def _hooked_dense(layer: Any) -> list[str]:
    seen: list[str] = []
    layer.output.dense.register_forward_hook(lambda module, args, output: (seen.append("dense"), output + 1)[1])
    return seen


CHANGES = {
    "hook on the norm": (_hooked("LayerNorm"), 1),
    "hook on the dropout": (_hooked("dropout"), 1),
    "hook on the linear layer": (_hooked_dense, 0),
    "forward of the norm": (_own_forward, 1),
    "class of the norm": (_own_class, 1),
    "class of the dropout": (_own_dropout, 1),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changed_modules_are_called(change, pair):
    apply, lost = CHANGES[change]
    before = run(pair[0])[0]
    called = [apply(model.encoder.layer[0]) for model in pair]
    (expected, _), (output, count) = map(run, pair)
    assert called[0] and called[0] == called[1]
    assert count == 2 * LAYERS - lost
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert (
        ("hook" in change and "linear" not in change)
        or change == "class of the norm"
        or not torch.equal(expected, before)
    )


@torch.no_grad()
def test_hooks_on_all_modules_and_replaced_functions_are_called(pair, monkeypatch):
    model = pair[1]
    assert run(model)[1] == 2 * LAYERS
    seen = []
    handle = torch_module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    assert run(model)[1] == 0
    handle.remove()
    assert seen.count(nn.LayerNorm) == 2 * LAYERS + 1
    with monkeypatch.context() as patch:
        stock = functional.layer_norm
        patch.setattr(functional, "layer_norm", lambda *args: stock(*args) * 0.5)
        (output, count), (expected, _) = run(model), run(pair[0])
        assert count == 0 and torch.equal(output, expected)
    with monkeypatch.context() as patch:
        patch.setattr(nn.Dropout, "forward", lambda self, x: x + 1.0)
        (output, count), (expected, _) = run(model), run(pair[0])
        assert count == 0
        torch.testing.assert_close(output, expected)
    assert run(model)[1] == 2 * LAYERS


REASONS = {
    "hook on the norm": "it has hooks or another forward",
    "hook on the dropout": "its dropout was replaced or has hooks",
    "forward of the norm": "it has hooks or another forward",
    "class of the norm": "code of tests",
    "class of the dropout": "its dropout was replaced or has hooks",
}


@pytest.mark.parametrize("change", REASONS)
@torch.no_grad()
def test_the_reason_is_explained(change, pair):
    model = pair[1]
    run(model)
    assert "hooks" not in str(hf_rocm.explain(model).details())
    CHANGES[change][0](model.encoder.layer[0])
    run(model)
    reasons = {entry.reason: entry.instances for entry in hf_rocm.explain(model).stock if entry.cls.endswith("Norm")}
    assert [count for reason, count in reasons.items() if REASONS[change] in reason] == [1]
    hf_rocm.restore(model)
    assert not any("_hf_rocm_stayed" in module.__dict__ for module in model.modules())


@torch.no_grad()
def test_a_reason_is_removed_by_the_next_call_that_is_served(pair):
    model = pair[1]
    norm = model.encoder.layer[0].output.LayerNorm
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(model)
    assert "autocast" in noted(norm)
    run(model)
    assert noted(norm) is None


@pytest.mark.parametrize("owner", [nn.LayerNorm, nn.Module])
@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
@torch.no_grad()
def test_replaced_calls_take_effect(name, owner, pair, monkeypatch):
    model = pair[1]
    run(model)
    call = getattr(owner, name)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = call(self, *args, **kwargs)
        return output * 0.5 if type(self) is nn.LayerNorm else output

    monkeypatch.setattr(owner, name, changed, raising=False)
    (output, count), (expected, _) = run(model), run(pair[0])
    assert count == 0
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_dropout_in_training_mode_draws_what_stock_draws():
    stock = build("Bert", hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.0)
    models = [model.train() for model in (stock, prepared(stock))]
    outputs = []
    for model in models:
        torch.manual_seed(3)
        outputs.append(run(model))
    assert [count for _, count in outputs] == [0, 0]
    torch.testing.assert_close(outputs[1][0], outputs[0][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["Bert", "SiglipVision", "ViT"])
def test_gradients_equal_stock(family):
    stock = build(family)
    models = stock, prepared(stock)
    counts = []
    for model in models:
        output, count = run(model)
        output.square().sum().backward()
        counts.append(count)
    assert counts == [0, FAMILIES[family][2] * LAYERS]
    largest = max(float(parameter.grad.abs().max()) for parameter in stock.parameters() if parameter.grad is not None)
    for (name, parameter), actual in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert (parameter.grad is None) == (actual.grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(actual.grad, parameter.grad, rtol=1e-3, atol=1e-4 * largest)


@torch.no_grad()
def test_other_dtypes_and_autocast_follow_pytorchs_rules(pair):
    """PyTorch's own dtype rules apply under autocast, and if a norm has a different dtype from the other layers."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (expected, _), (output, count) = map(run, pair)
    assert count == 0 and output.dtype == expected.dtype
    torch.testing.assert_close(output, expected, rtol=0.05, atol=0.05)
    for model in pair:
        model.bfloat16().encoder.layer[0].output.LayerNorm.float()
    (expected, _), (output, count) = map(run, pair)
    assert count == 2 * LAYERS - 1 and output.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected, rtol=0.05, atol=0.05)


@torch.no_grad()
def test_if_aiter_is_required_the_sum_and_the_norm_are_separate(pair):
    aiter = {**options.current().aiter, "rms_norm": Switch.REQUIRED}
    with options.override(aiter=aiter):
        assert run(pair[1])[1] == 0
    for tier, expected in (("eager", 2 * LAYERS), ("torch", 2 * LAYERS)):
        with options.override(tiers={"rms_norm": tier}):
            assert run(pair[1])[1] == expected


def test_a_norm_without_weights_or_over_several_dims_is_left_to_pytorch():
    output, residual = torch.randn(3, 8), torch.randn(3, 8)
    with ops.recording() as routes:
        bare = encoder.norm_of_sum(nn.LayerNorm(8, elementwise_affine=False), output, residual)
        wide = encoder.norm_and_sum(nn.LayerNorm((3, 8)), output, residual)
        broadcast = encoder.norm_of_sum(nn.LayerNorm(8), output, residual[:1])
    assert routes == []
    assert torch.equal(bare, functional.layer_norm(output + residual, (8,)))
    assert torch.equal(wide[0], functional.layer_norm(output + residual, (3, 8))) and wide[1].shape == (3, 8)
    assert torch.equal(broadcast, functional.layer_norm(output + residual[:1], (8,)))
    with ops.recording() as routes:
        normed, total = encoder.norm_and_sum(nn.LayerNorm(8, bias=False), output, residual, nn.Dropout(0.0))
    assert [route.operation for route in routes] == [NAME] and torch.equal(total, output + residual)
    assert torch.equal(normed, functional.layer_norm(total, (8,)))


@torch.no_grad()
def test_the_compiler_gets_a_sum_and_a_norm():
    model = prepared(build("Bert"))
    graphs: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    expected = model(input_ids=TOKENS).last_hidden_state
    actual = torch.compile(model, backend=backend)(input_ids=TOKENS).last_hidden_state
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert NAME not in "".join(graph.code for graph in graphs)
    assert sum(graph.code.count("layer_norm(") for graph in graphs) == 2 * LAYERS + 1


@pytest.mark.parametrize("family", ["SiglipVision", "CLIPVision"])
@torch.no_grad()
def test_a_layer_is_called_with_positional_and_keyword_arguments(family):
    stock = build(family)
    name = f"{family.removesuffix('Vision')}EncoderLayer"
    x = torch.randn(2, 5, 64)
    for call in (
        lambda layer: layer(x, None, *_causal(layer)),
        lambda layer: layer(hidden_states=x, attention_mask=None, **dict.fromkeys(_names(layer))),
    ):
        results = []
        for model in (stock, prepared(stock)):
            layer = next(module for module in model.modules() if type(module).__name__ == name)
            results.append(call(layer))
        assert type(results[0]) is type(results[1])
        one, other = (result[0] if isinstance(result, tuple) else result for result in results)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def _names(layer: Any) -> list[str]:
    import inspect

    parameters = inspect.signature(type(layer).forward).parameters
    return [name for name in ("causal_attention_mask",) if name in parameters]


def _causal(layer: Any) -> list[None]:
    return [None for _ in _names(layer)]


@torch.no_grad()
def test_one_kernel_computes_an_activation_that_is_a_formula_in_stock(monkeypatch):
    """On a GPU, one kernel computes the formula. On the CPU, under autocast, or if the module has a hook or was
    replaced by an activation without a kernel, the module is called."""
    stock = build("CLIPVision")
    model = prepared(stock)
    expected = run(stock)[0]

    def run_counting() -> tuple[torch.Tensor, int]:
        with ops.recording() as routes:
            output = model(pixel_values=PIXELS).last_hidden_state
        return output, sum(route.operation == "act" for route in routes)

    assert run_counting()[1] == 0
    monkeypatch.setattr(mlp, "one_kernel", lambda *_: True)
    output, count = run_counting()
    assert count == LAYERS
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    layers = [module for module in model.modules() if type(module).__name__ == "CLIPMLP"]
    seen: list[str] = []
    layers[0].activation_fn.register_forward_hook(lambda *_: seen.append("hook"))
    layers[1].activation_fn = nn.Tanh()
    assert run_counting()[1] == 0 and seen == ["hook"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layers[1].activation_fn = transformers.activations.NewGELUActivation()
        assert run_counting()[1] == 0
    assert run_counting()[1] == 1
