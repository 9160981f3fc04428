"""In fp32, greedy decoding generates the same tokens as stock.

In bf16, stock's logit of every generated token is close to stock's largest logit.
"""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops, options
from tests.parity.models import DECODERS, assert_served, tokens
from tests.tolerance import allowed_error

every_decoder = pytest.mark.parametrize("name", DECODERS)
every_tier = pytest.mark.parametrize("tier", ["torch", "eager"])
NEW = 12


def greedy(model, ids, mask, **arguments):
    return model.generate(
        input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, **arguments
    )


@every_tier
@every_decoder
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_greedy_tokens_are_equal_in_fp32(name, tier, cache, padded, trio):
    prepared, stock, _ = trio(name, torch.float32)
    ids = tokens(2, 8)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0
    arguments = {} if cache is None else {"cache_implementation": cache}
    with options.override(tier=tier), ops.recording() as routes:
        actual = greedy(prepared, ids, mask, **arguments)
    assert_served(name, prepared, routes, calls=NEW)
    assert torch.equal(actual, greedy(stock, ids, mask, **arguments))


@every_tier
@every_decoder
def test_bf16_tokens_have_almost_the_largest_logit_of_stock(name, tier, trio):
    """Teacher-forced: the stock logit of every chosen token is within tolerance of stock's maximum."""
    prepared, stock, exact = trio(name, torch.bfloat16)
    ids = tokens(2, 8)
    with options.override(tier=tier):
        chosen = greedy(prepared, ids, torch.ones_like(ids))
    logits = stock(input_ids=chosen).logits[:, 7:-1]
    reference = exact(input_ids=chosen).logits[:, 7:-1]
    picked = logits.gather(-1, chosen[:, 8:, None])[..., 0]
    # twice the allowed error, because the logit of the chosen token and stock's maximum both have errors
    allowed = 2 * allowed_error(logits, reference)
    assert (logits.amax(-1) - picked).max().item() <= allowed


@every_decoder
def test_beam_search_and_sampling_equal_stock(name, trio):
    prepared, stock, _ = trio(name, torch.float32)
    ids = tokens(2, 8)
    for arguments in ({"num_beams": 3, "do_sample": False}, {"do_sample": True, "top_k": 20}):
        results = []
        for model in (prepared, stock):
            torch.manual_seed(0)
            results.append(model.generate(input_ids=ids, max_new_tokens=6, **arguments))
        assert torch.equal(*results)
