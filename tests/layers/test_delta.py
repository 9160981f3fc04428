"""Layers with the gated delta rule run a prompt or a step as one operation, and a step updates the states in place.

Calls that these operations don't support run stock code.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from types import ModuleType

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache

import hf_rocm
from hf_rocm import layers, ops, options
from hf_rocm.layers import grouped_linear
from hf_rocm.layers.fallback_reasons import noted
from hf_rocm.overlay.bind import binding_of
from tests.coverage.case import SMALL
from tests.coverage.cases import CASES
from tests.releases import RELEASE
from tests.tolerance import assert_as_good_as_eager

SINCE = Version("5.16")
NAMES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")

served = pytest.mark.skipif(RELEASE < SINCE, reason="not run: older layers of this kind stay stock")


def pair(name, dtype=torch.float32):
    """Returns (a stock model, the same model prepared). One of the two layers has the gated delta rule."""
    case = next(case for case in CASES if case.overlay == name and case.applies and not case.variant)
    stock = case.build(dtype)
    hf_rocm.activate(name)
    return stock, hf_rocm.prepare(deepcopy(stock), force=True)


def linear_layer(model):
    return next(module for module in model.modules() if type(module).__name__.endswith("GatedDeltaNet"))


def tokens(batch, length):
    return torch.randint(3, SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1))


def states_of(cache):
    layer = cache.layers[0]
    return layer.conv_states[0], layer.recurrent_states[0]


def run(model, ids, cache=None):
    """Run a prompt of five tokens, then single tokens. Returns the logits of every call's last token, and the cache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        logits = [model(ids[:, :5], past_key_values=cache).logits[:, -1]]
        for position in range(5, ids.shape[1]):
            logits.append(model(ids[:, position : position + 1], past_key_values=cache).logits[:, -1])
    return torch.stack(logits), cache


@served
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_runs_as_one_operation(dtype, name):
    stock, prepared = pair(name, dtype)
    ids = tokens(2, 9)
    expected, stock_cache = run(stock, ids)
    reference = deepcopy(stock).double()
    # The grouped GEMM does not support float64.
    reference.config._experts_implementation = "eager"
    exact, exact_cache = run(reference, ids)
    with ops.recording() as routes:
        actual, cache = run(prepared, ids)
    steps = [route.shapes for route in routes if route.operation == "gated_delta_step"]
    assert steps == [((2, 2, 16), (2, 2, 2, 16), (2, 128, 4), (2, 4, 16, 16))] * 4
    assert prompts_of(routes) == [((2, 5, 2, 16), (2, 5, 2, 2, 16))]
    for state, stock_state, exact_state in zip(
        states_of(cache), states_of(stock_cache), states_of(exact_cache), strict=True
    ):
        assert_as_good_as_eager(state, stock_state, exact_state.double())
    if dtype == torch.float32:
        assert_as_good_as_eager(actual, expected, exact)
    assert noted(linear_layer(prepared)) is None


def exactly(model, call):
    """The result of `call` with a prepared float64 copy of this stock model, whose layers run the eager operations.

    A float64 copy with stock layers would be less exact, because they call functions that always compute in fp32.
    """
    copy = hf_rocm.prepare(deepcopy(model).double(), force=True)
    # The grouped GEMM does not support float64.
    copy.config._experts_implementation = "eager"
    with options.override(tier="eager"):
        return call(copy)


def prompts_of(routes):
    return [route.shapes for route in routes if route.operation == "gated_delta_prefill"]


@served
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [(70,), (1, 1, 1), (2, 66), (65, 1, 4)], ids=str)
def test_every_part_of_a_prompt_runs_as_one_operation(parts, dtype, name):
    """The parts of a prompt share one cache. A part of one token is a step if it is not the first part."""
    stock, prepared = pair(name, dtype)

    def in_parts(model):
        cache, begin, results = DynamicCache(config=model.config), 0, []
        with torch.no_grad():
            for part in parts:
                ids = tokens(2, 70)[:, begin : begin + part]
                results.append(model(ids, past_key_values=cache).logits)
                begin += part
        return torch.cat(results, 1), *states_of(cache)

    with ops.recording() as routes:
        actual = in_parts(prepared)
    runs = in_parts(stock), exactly(stock, in_parts), actual
    assert [shapes[0][1] for shapes in prompts_of(routes)] == [
        part for index, part in enumerate(parts) if part > 1 or not index
    ]
    for number, (stock_result, exact, result) in enumerate(zip(*runs, strict=True)):
        if number or dtype == torch.float32:
            assert_as_good_as_eager(result, stock_result, exact.double())
    assert noted(linear_layer(prepared)) is None


@served
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cached", [True, False])
def test_left_padding_does_not_change_results(cached, name):
    """Rows with padding on the left have the same results as rows without padding.

    Stock sets the hidden states of padding tokens to zero.
    """
    stock, prepared = pair(name)
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.int64)
    mask[0, :7] = 0
    settings = {"attention_mask": mask, "use_cache": cached}
    with torch.no_grad():
        with ops.recording() as routes:
            actual = prepared(ids, **settings).logits
            alone = prepared(ids[:1, 7:], use_cache=cached).logits
        expected, exact = stock(ids, **settings).logits, exactly(stock, lambda model: model(ids, **settings).logits)
    assert [shapes[0][:2] for shapes in prompts_of(routes)] == [(2, 40), (1, 33)]
    seen = mask.bool()
    assert_as_good_as_eager(actual[seen], expected[seen], exact[seen])
    assert_as_good_as_eager(alone[0], expected[0, 7:], exact[0, 7:])
    assert noted(linear_layer(prepared)) is None


@served
@pytest.mark.parametrize("name", NAMES)
def test_the_states_keep_their_addresses(name):
    prepared = pair(name)[1]
    ids = tokens(1, 7)
    cache = run(prepared, ids[:, :6])[1]
    before = [(state.data_ptr(), state.clone()) for state in states_of(cache)]
    with torch.no_grad():
        prepared(ids[:, 6:], past_key_values=cache)
    for (address, old), state in zip(before, states_of(cache), strict=True):
        assert state.data_ptr() == address and not torch.equal(state, old)


@pytest.mark.parametrize("name", [name for name in NAMES if name in transformers.CONFIG_MAPPING])
def test_greedy_tokens_equal_stock(name):
    stock, prepared = pair(name)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, :2] = 0
    with torch.no_grad(), ops.recording() as routes:
        expected = stock.generate(tokens(2, 6), attention_mask=mask, **settings)
        assert torch.equal(prepared.generate(tokens(2, 6), attention_mask=mask, **settings), expected)
    steps = [route for route in routes if route.operation == "gated_delta_step"]
    assert len(steps) == (5 if RELEASE >= SINCE else 0)
    assert len(prompts_of(routes)) == (1 if RELEASE >= SINCE else 0)
    assert (binding_of(linear_layer(prepared)) is not None) is (RELEASE >= SINCE)


@served
@pytest.mark.parametrize("name", NAMES)
def test_fused_projections_equal_separate_layers(name):
    linear = linear_layer(pair(name)[1])
    names, x = binding_of(linear).fuses, torch.ones(1, 64)
    with torch.no_grad():
        assert grouped_linear.live(linear) is not None
        for part, child in zip(layers.project(linear, x, *names), names, strict=True):
            torch.testing.assert_close(part, getattr(linear, child)(x))


def outcome(layer, x, cache, further):
    """Returns a layer's result as numbers, or its error message if packed sequences or wrong masks raise an error."""
    try:
        return layer(x, cache_params=cache, **further).tolist()
    except (ValueError, RuntimeError) as error:
        return str(error)


class Subclass(DynamicCache):
    pass


def _scaled(function):
    return lambda *args, **kwargs: function(*args, **kwargs) * 1.5


def _own_norm(layer, patch):
    class OwnNorm(type(layer.norm)):
        def forward(self, x, gate):
            return super().forward(x, gate) * 1.5

    layer.norm.__class__ = OwnNorm


def _other_norm(layer, patch):
    class Other(torch.nn.Module):
        def forward(self, x, gate):
            return x * gate

    layer.norm = Other()


def _norms_activation(layer, patch):
    layer.norm.activation = "gelu"


def _registered(layer, patch):
    patch.setitem(transformers.activations.ACT2FN, "silu", torch.nn.Tanh)


# name → (a change made before the calls, the reason why the calls run stock code)
REPLACED = {
    "class of the norm": (_own_norm, "its norm is of type OwnNorm"),
    "other norm": (_other_norm, "its norm is of type Other"),
    "activation of the norm": (_norms_activation, "an activation is not silu"),
    "forward of the norm's class": (
        lambda layer, patch: patch.setattr(type(layer.norm), "forward", _scaled(type(layer.norm).forward)),
        "its convolution or its norm",
    ),
    "call of the norm's class": (
        lambda layer, patch: patch.setattr(
            type(layer.norm), "__call__", _scaled(type(layer.norm).__call__), raising=False
        ),
        "its convolution or its norm",
    ),
    "registered activation": (_registered, "the activation 'silu' of transformers was replaced"),
    "function of PyTorch": (
        lambda layer, patch: patch.setattr(torch.nn.functional, "silu", _scaled(torch.nn.functional.silu)),
        "the activation 'silu' of transformers was replaced",
    ),
}


@served
@pytest.mark.parametrize("change", REPLACED)
@pytest.mark.parametrize("name", NAMES)
def test_replaced_parts_are_called_as_in_stock(name, change, monkeypatch):
    """The replacements are called in a prompt and in the steps after it."""
    stock, prepared = pair(name)
    before = run(stock, tokens(2, 7))[0]
    apply, reason = REPLACED[change]
    results = []
    with ops.recording() as routes:
        for model in (stock, prepared):
            with monkeypatch.context() as patch:
                apply(linear_layer(model), patch)
                results.append(run(model, tokens(2, 7)))
    (expected, stock_cache), (actual, cache) = results
    assert not [route for route in routes if route.operation.startswith("gated_delta")]
    assert reason in noted(linear_layer(prepared))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected, before, rtol=1e-2, atol=1e-2)
    for state, stock_state in zip(states_of(cache), states_of(stock_cache), strict=True):
        torch.testing.assert_close(state, stock_state, rtol=1e-4, atol=1e-5)


@served
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_layers_are_stock(dtype, name):
    """PyTorch's autocast rules determine the dtypes of GEMMs and states."""
    results = []
    stock, prepared = pair(name, dtype)
    with torch.autocast("cpu", torch.bfloat16), ops.recording() as routes:
        for layer, config in ((linear_layer(model), model.config) for model in (stock, prepared)):
            cache = DynamicCache(config=config)
            x = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
            with torch.no_grad():
                outputs = [layer(x[:, :5], cache_params=cache), layer(x[:, 5:], cache_params=cache)]
            results.append((*outputs, *states_of(cache)))
    assert not [route for route in routes if route.operation.startswith("gated_delta")]
    assert "under autocast" in noted(linear_layer(prepared))
    for result, reference in zip(results[1], results[0], strict=True):
        assert result.dtype == reference.dtype and torch.equal(result, reference)


@served
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("library", "fla is installed"),
        ("hook", "a hook or another forward"),
        ("bias", "its convolution has a bias, or an activation is not silu"),
        ("activation", "its convolution has a bias, or an activation is not silu"),
        ("aiter", "must run in the aiter tier"),
        ("gradient", "no gradient"),
        ("mask", "the padding mask and the tokens have different shapes"),
        ("packed", "packed sequences"),
        ("subclass", "the cache is of type Subclass"),
    ],
)
@pytest.mark.parametrize("length", [1, 2])
def test_unsupported_calls_run_stock(length, change, reason, monkeypatch):
    stock, prepared = pair("qwen3_next")
    cache = run(prepared, tokens(1, 6))[1]
    layer, stock_layer = linear_layer(prepared), linear_layer(stock)
    x = torch.randn(1, length, 64, generator=torch.Generator().manual_seed(3))
    further, gradients, aiter = {}, change == "gradient", options.current().aiter
    if change == "library":
        monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    elif change == "hook":
        layer.norm.register_forward_hook(lambda *_: None)
    elif change == "bias":
        for module in (layer, stock_layer):
            module.conv1d.bias = torch.nn.Parameter(torch.ones(128))
    elif change == "activation":
        for module in (layer, stock_layer):
            module.activation = "gelu"
    elif change == "aiter":
        aiter = {**aiter, "attention": options.Switch.REQUIRED}
    elif change == "mask":
        further = {"attention_mask": torch.ones(1, 3)}
    elif change == "packed":
        further = {"seq_idx": None, "cu_seq_lens_q": torch.tensor([0, 1])}
    elif change == "subclass":
        cache.__class__ = Subclass
    copy = deepcopy(cache)
    with torch.set_grad_enabled(gradients), options.override(aiter=aiter), ops.recording() as routes:
        assert outcome(layer, x, cache, further) == outcome(stock_layer, x, copy, further)
    assert reason in noted(layer)
    assert not [route for route in routes if route.operation.startswith("gated_delta")]


@served
def test_a_cache_that_records_its_past_is_left_to_stock():
    """Stock stores earlier inputs of the convolution in a cache that records past states, to undo rejected drafts."""
    prepared = pair("qwen3_next")[1]
    cache = run(prepared, tokens(1, 6))[1]
    cache.activate_past_recording()
    with torch.no_grad():
        prepared(tokens(1, 1), past_key_values=cache)
    assert noted(linear_layer(prepared)) == "the cache records past states"
    assert cache.layers[0].conv_states[0].shape[2] > 4
