"""generate() returns stock's tokens without a cache and with caches, padding, beams, prompt lookup and sliding windows.

With the oldest tested release, all models that generate are tested. With later ones, a few models with most kinds of
input and cache are tested, and the models whose overlay no newer tested release uses. test_forward.py compares the
forwards of all models, including those on a filled cache, with stock's in every release.
"""

from __future__ import annotations

import pytest
import torch

from tests.coverage import inputs
from tests.coverage.case import params
from tests.coverage.cases import CASES
from tests.coverage.hits import assert_served, counted, recording
from tests.coverage.releases import EVERYWHERE, is_the_first, is_the_last

SELECTED = [case for case in CASES if is_the_first() or case.id in EVERYWHERE or is_the_last(case)]
GENERATING = [
    case for case in SELECTED if case.kind in ("text", "seq2seq", "audio", "images in text", "image and text")
]
TEXT = [case for case in SELECTED if case.kind == "text"]

# the config of Cohere2 in 4.53 reads an attribute that it deprecates
pytestmark = pytest.mark.filterwarnings("ignore:The `sliding_window_pattern` attribute is deprecated:FutureWarning")

MODES = {
    "greedy": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "no cache": {"use_cache": False},
}


def generated(case, model, padding=None, **options):
    arguments = inputs.arguments(case, model, padding)
    arguments.pop("decoder_input_ids", None)
    # the model must not generate image tokens, because generated tokens are fed back as text
    if case.kind in ("images in text", "image and text"):
        options["suppress_tokens"] = [inputs.IMAGE_START, inputs.IMAGE_END, inputs.VIDEO_TOKEN, inputs.IMAGE_TOKEN]
    with torch.inference_mode():
        return model.generate(**arguments, max_new_tokens=14, do_sample=False, **options)


@pytest.mark.parametrize("mode", MODES)
@params(GENERATING, without="generate")
def test_generated_tokens_equal_stock(case, mode, trio):
    if mode in case.unsupported_by_stock:
        pytest.skip(f"stock can't run this: {case.unsupported_by_stock[mode]}")
    prepared, stock, _ = trio()
    try:
        expected = generated(case, stock, **MODES[mode])
    except Exception as error:
        if mode != "static" or not (case.experts or "does not support" in str(error)):
            raise
        pytest.skip(f"stock can't run this in this release: {str(error).splitlines()[0]}")
    with recording() as routes, counted() as hits:
        actual = generated(case, prepared, **MODES[mode])
    assert_served(prepared, case.classes(), routes, hits)
    assert torch.equal(actual, expected)


@params(TEXT, without="padding")
def test_tokens_of_a_left_padded_batch_equal_stock(case, trio):
    prepared, stock, _ = trio()
    assert torch.equal(generated(case, prepared, inputs.LEFT), generated(case, stock, inputs.LEFT))


@params(TEXT, without="assisted")
def test_tokens_with_rejected_drafts_equal_stock(case, trio):
    """Prompt lookup verifies several drafts at once on a filled cache, and some drafts are rejected."""
    prepared, stock, _ = trio()
    prompt = {"input_ids": inputs.tokens(1, 9), "max_new_tokens": 12, "do_sample": False, "prompt_lookup_num_tokens": 3}
    with torch.inference_mode():
        try:
            expected = stock.generate(**prompt)
        except ValueError as error:
            # In 5.0 to 5.13, a full sliding cache can't be cropped.
            if "Cannot `crop`" not in str(error):
                raise
            pytest.skip(f"stock can't run this: {error}")
        assert torch.equal(prepared.generate(**prompt), expected)
