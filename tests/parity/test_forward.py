"""Forward passes run hf_rocm's path, and their outputs equal stock's within a tolerance."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import DynamicCache

import hf_rocm
from hf_rocm import ops, options
from tests.parity import models
from tests.parity.models import DECODERS, MODELS, assert_fused_gemms_ran, assert_served, static_cache, tokens
from tests.tolerance import assert_run_as_good_as_eager

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
every_tier = pytest.mark.parametrize("tier", ["torch", "eager"])
every_model = pytest.mark.parametrize("name", MODELS)
every_decoder = pytest.mark.parametrize("name", DECODERS)

PADDING = {
    "none": [[1] * 9, [1] * 9],
    "left": [[0] * 4 + [1] * 5, [1] * 9],
    "right": [[1] * 5 + [0] * 4, [1] * 9],
}


def compare(name, trio, tier, dtype, run, calls, attended=None):
    """Run `run(model)`, which returns named tensors, on all three models. Compare hf_rocm's error with stock's."""
    prepared, stock, exact = trio(name, dtype)
    with options.override(tier=tier), ops.recording() as routes:
        actual = run(prepared)
    assert {route.tier for route in routes} == {tier}
    assert_served(name, prepared, routes, calls)
    assert_fused_gemms_ran(prepared, routes)
    with ops.recording() as routes:
        same_dtype, expected = run(stock), run(exact)
    # The other two models stayed stock.
    assert routes == []
    assert_run_as_good_as_eager(actual, same_dtype, expected)


def outputs(result, keep=None):
    """Returns the logits and all hidden states. keep: selects the positions to compare."""
    named = {"logits": result.logits}
    named.update({f"hidden {layer}": state for layer, state in enumerate(result.hidden_states)})
    if keep is None:
        return named
    return {part: value[keep] for part, value in named.items()}


@every_tier
@every_dtype
@every_model
@pytest.mark.parametrize("padding", PADDING)
def test_outputs_equal_stock(name, dtype, tier, padding, trio):
    mask = torch.tensor(PADDING[padding])
    # outputs at padding tokens are not compared, because stock's own implementations also differ there
    keep = mask.bool()

    def run(model):
        result = model(input_ids=tokens(2, 9), attention_mask=mask, output_hidden_states=True)
        return outputs(result, keep)

    compare(name, trio, tier, dtype, run, calls=1)


@every_tier
@every_dtype
@every_decoder
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_prefill_decoding_and_a_chunk_on_a_filled_cache_equal_stock(name, dtype, tier, cache, padding, trio):
    mask = torch.tensor(PADDING[padding])
    prompt, further = tokens(2, 9), tokens(2, 5, seed=1)

    def run(model):
        past = DynamicCache() if cache == "dynamic" else static_cache(model, 2, 20)
        seen, results = mask, {}
        steps = {"prefill": prompt, "decode": further[:, :1], "chunk": further[:, 1:4], "again": further[:, 4:]}
        start = 0
        for step, ids in steps.items():
            if step != "prefill":
                seen = torch.cat([seen, torch.ones_like(ids)], dim=1)
            positions = (seen.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            cache_position = torch.arange(start, start + ids.shape[1])
            result = model(
                input_ids=ids,
                attention_mask=seen,
                position_ids=positions,
                cache_position=cache_position,
                past_key_values=past,
                use_cache=True,
                output_hidden_states=True,
            )
            keep = seen[:, -ids.shape[1] :].bool()
            results.update({f"{step} {part}": value for part, value in outputs(result, keep).items()})
            start += ids.shape[1]
        return results

    compare(name, trio, tier, dtype, run, calls=4)


@every_tier
@every_decoder
def test_a_static_prefill_without_a_mask_equals_stock(name, tier, trio):
    """Newer releases omit the mask and rely on sdpa's top-left alignment. hf_rocm's attention aligns bottom-right."""

    def run(model):
        past = static_cache(model, 1, 32)
        first = model(input_ids=tokens(1, 6), past_key_values=past, use_cache=True, output_hidden_states=True)
        second = model(input_ids=tokens(1, 1, 1), past_key_values=past, use_cache=True, output_hidden_states=True)
        return outputs(first) | {f"next {part}": value for part, value in outputs(second).items()}

    compare(name, trio, tier, torch.float32, run, calls=2)


@every_model
def test_attention_weights_of_an_eager_model_equal_stock(name, checkpoint):
    """An eager model runs stock's eager attention, so attention weights differ only by rounding."""
    folder = checkpoint(name, torch.float32)
    prepared = models.load_prepared(folder, attn_implementation="eager")
    stock = models.load_stock(name, folder, attn_implementation="eager")
    with ops.recording() as routes:
        actual = prepared(input_ids=tokens(2, 9), output_attentions=True)
    assert not [route for route in routes if route.operation == "attention"]
    expected = stock(input_ids=tokens(2, 9), output_attentions=True)
    assert len(actual.attentions) == len(expected.attentions) == 2
    for weights, reference in zip(actual.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(weights, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.output_attentions=True. is not supported:UserWarning")
@every_model
def test_attention_weights_of_an_sdpa_model_equal_stock(name, trio):
    prepared, stock, _ = trio(name, torch.float32)
    actual = prepared(input_ids=tokens(2, 9), output_attentions=True)
    expected = stock(input_ids=tokens(2, 9), output_attentions=True)
    assert type(actual.attentions) is type(expected.attentions)
    for weights, reference in zip(actual.attentions or (), expected.attentions or (), strict=True):
        assert (weights is None) == (reference is None)
        if reference is not None:
            torch.testing.assert_close(weights, reference, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-4, atol=1e-5)


def test_a_bert_decoder_with_a_cache_equals_stock(checkpoint):
    """hf_rocm serves a BERT decoder in transformers 5.

    In 4.x, calls with a cache run stock code, and the reason is recorded.
    """
    folder = checkpoint("bert", torch.float32)
    prepared = models.load_prepared(folder, is_decoder=True, auto_class="BertLMHeadModel")
    stock = transformers.BertLMHeadModel.from_pretrained(folder, is_decoder=True, torch_dtype="auto").eval()
    ids = tokens(2, 7)
    results = []
    for model in (prepared, stock):
        first = model(input_ids=ids[:, :6], use_cache=True)
        second = model(input_ids=ids[:, 6:], past_key_values=first.past_key_values, use_cache=True)
        results.append(torch.cat([first.logits, second.logits], dim=1))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    stayed = hf_rocm.explain(prepared).parts[0].stayed_stock
    if transformers.__version__.startswith("4."):
        assert list(stayed.values()) == [2] and "stock" in next(iter(stayed))
    else:
        assert stayed == {}


@every_model
def test_autocast_has_stocks_dtypes_and_an_error_within_the_tolerance(name, checkpoint):
    """Outputs of an fp32 model in mixed precision have stock's dtypes. The tolerance is derived from stock's error."""
    folder = checkpoint(name, torch.float32)
    prepared, stock = models.load_prepared(folder), models.load_stock(name, folder)
    exact = models.in_float64(models.load_stock(name, folder))(input_ids=tokens(2, 9), output_hidden_states=True)
    with torch.autocast("cpu", torch.bfloat16):
        with ops.recording() as routes:
            actual = prepared(input_ids=tokens(2, 9), output_hidden_states=True)
        expected = stock(input_ids=tokens(2, 9), output_hidden_states=True)
    assert_served(name, prepared, routes, calls=1)
    assert_run_as_good_as_eager(outputs(actual), outputs(expected), outputs(exact))
