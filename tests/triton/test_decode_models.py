"""Whole models with dynamic and static caches: steps of padded rows run in the decode kernel; tokens equal stock."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hf_rocm
from hf_rocm import ops
from tests.parity.models import GROUPED, SHARED, tokens

PADDING = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
# The window is shorter than the prompt, so that the cache rolls from the first step on.
WINDOW = {"sliding_window": 4}
MODELS = {
    "llama": {},
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 24},  # with a softcap
    # with sinks
    "gpt_oss": {
        **WINDOW,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": None,
    },
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request):
    """Returns (prepared model, stock model)."""
    config = AutoConfig.for_model(request.param, **{**SHARED, **GROUPED, **MODELS[request.param]})
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.normal_(0, 0.15)
    actual = deepcopy(stock)
    hf_rocm.activate(request.param)
    hf_rocm.prepare(actual, force=True)
    return actual, stock


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens_equal_stock(pair, cache):
    output, stock = pair
    arguments = {"attention_mask": PADDING, "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    arguments["cache_implementation"] = cache
    with torch.no_grad(), ops.recording() as routes:
        actual = output.generate(tokens(2, 5), **arguments)
        assert torch.equal(actual, stock.generate(tokens(2, 5), **arguments))
    steps = [route for route in routes if "attention" in route.operation and route.shapes[0][2] == 1]
    assert len(steps) == 8 and {route.tier for route in steps} == {"triton"}
