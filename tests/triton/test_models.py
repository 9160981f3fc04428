"""Whole models with the elementwise Triton kernels: stock's logits and greedy tokens, and the routes."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops, options
from tests.parity.conftest import checkpoint, trio  # noqa: F401 - fixtures
from tests.parity.models import tokens
from tests.tolerance import assert_as_good_as_eager

KERNELS = "rms_norm=triton,act_and_mul=triton,rope=triton,attention=torch,linear=torch"
PADDING = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
def test_logits_are_as_accurate_as_eager(name, dtype, trio):  # noqa: F811
    output, stock, exact = trio(name, dtype)
    batch = {"input_ids": tokens(2, 5), "attention_mask": PADDING}
    with options.override(tier=KERNELS), ops.recording() as routes:
        actual = output(**batch).logits
    assert _kernels(routes) >= {"rms_norm", "act_and_mul", "rope_into_cache", "rotary_angles"}
    keep = PADDING.bool()
    assert_as_good_as_eager(actual[keep], stock(**batch).logits[keep], exact(**batch).logits[keep])


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_greedy_tokens_with_a_static_cache_equal_stock(name, trio):  # noqa: F811
    output, stock, _ = trio(name, torch.float32)
    arguments = {"attention_mask": PADDING, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    arguments["cache_implementation"] = "static"
    with options.override(tier=KERNELS), ops.recording() as routes:
        actual = output.generate(tokens(2, 5), **arguments)
    assert torch.equal(actual, stock.generate(tokens(2, 5), **arguments))
    assert "rope_into_cache" in _kernels(routes)


def _kernels(routes):
    return {route.operation for route in routes if route.tier == "triton"}
