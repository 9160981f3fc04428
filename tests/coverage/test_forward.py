"""Every served model returns stock's results within the derived tolerance, and the replacement forwards run."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from tests.coverage import inputs
from tests.coverage.case import params
from tests.coverage.cases import CASES
from tests.coverage.hits import assert_experts_served, assert_served, counted, recording
from tests.coverage.routing import choosing
from tests.tolerance import assert_run_as_good_as_eager

TEXT = [case for case in CASES if case.kind == "text"]
PADDED = [case for case in CASES if case.kind in ("text", "encoder", "seq2seq")]
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def compare(case, models, run):
    """Call `run(model)`, which returns named tensors, with the prepared model, stock, and stock in float64, and compare
    hf_rocm's error with stock's."""
    prepared, stock, exact = models
    with torch.inference_mode():
        with recording() as routes:
            with choosing(case) as stock_choices:
                same_dtype = run(stock)
            with inputs.in_float64(), choosing(case, stock_choices) as exact_choices:
                expected = run(exact)
        # The other two models stayed stock.
        assert routes == []
        with recording() as routes, counted() as hits, choosing(case, stock_choices) as prepared_choices:
            actual = run(prepared)
        assert_served(prepared, case.classes(), routes, hits)
        assert_experts_served(prepared, case.moe_class(), routes, hits)
    # Scores are fp32, but computed from results of GEMMs in this dtype.
    dtype = next(stock.parameters()).dtype
    assert len(prepared_choices.scores) == len(stock_choices.scores) == len(exact_choices.scores)
    if prepared_choices.scores:
        left, reference = (
            numbered(score.to(dtype) for score in choices.scores) for choices in (prepared_choices, stock_choices)
        )
        assert_run_as_good_as_eager(left, reference, numbered(exact_choices.scores))
    assert_run_as_good_as_eager(actual, same_dtype, expected)


def numbered(tensors):
    return {f"scores {call}": tensor for call, tensor in enumerate(tensors)}


@every_dtype
@params(CASES)
def test_outputs_equal_stock(case, dtype, trio):
    def run(model):
        return inputs.outputs(model(**inputs.arguments(case, model), output_hidden_states=True))

    compare(case, trio(dtype), run)


@pytest.mark.parametrize("padding", ["left", "right"])
@params(PADDED, without="padding")
def test_padded_batches_equal_stock(case, padding, trio):
    mask = inputs.LEFT if padding == "left" else inputs.RIGHT

    def run(model):
        result = model(**inputs.arguments(case, model, mask))
        # outputs at padding tokens are not compared: stock's implementations differ there too
        return inputs.outputs(result, None if case.kind == "seq2seq" else mask.bool())

    compare(case, trio(), run)


@every_dtype
@params(TEXT, without="cache")
def test_prefill_decoding_and_a_chunk_on_a_filled_cache_equal_stock(case, dtype, trio):
    prompt, further = inputs.tokens(2, 9), inputs.tokens(2, 5, seed=1)

    def run(model):
        past, results, length = DynamicCache(config=model.config) if _takes_config() else DynamicCache(), {}, 0
        for step, ids in (
            ("prefill", prompt),
            ("decode", further[:, :1]),
            ("chunk", further[:, 1:4]),
            ("again", further[:, 4:]),
        ):
            mask = torch.ones(2, length + ids.shape[1], dtype=torch.long)
            result = model(input_ids=ids, attention_mask=mask, past_key_values=past, use_cache=True)
            results[step] = result.logits
            length += ids.shape[1]
        return results

    compare(case, trio(dtype), run)


def _takes_config() -> bool:
    import inspect

    return "config" in inspect.signature(DynamicCache.__init__).parameters
