"""Attention on a GPU, compared with the float64 definition. Results must be contiguous, as on a CPU."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops, options
from tests.ops.test_attention import SHAPES, reference, tensors
from tests.tolerance import assert_as_good_as_eager

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("tier", ["torch", "eager"])
def test_attention_is_as_accurate_as_the_eager_tier(tier, shape, masked, dtype):
    b, _, _, s_q, s_k, d, _ = shape
    host = tensors(shape, dtype)
    mask = None
    if masked:
        mask = torch.rand(b, 1, s_q, s_k, generator=torch.Generator().manual_seed(3)) > 0.3
        # Every query attends to at least one key.
        mask[..., 0] = True
    rules = {"scale": d**-0.5, "causal": not masked}
    results = {}
    for entry in ("eager", tier):
        with options.override(tiers={"attention": entry}), ops.recording() as routes:
            query, key, value = (part.cuda() for part in host)
            results[entry], _ = ops.attention(query, key, value, mask=None if mask is None else mask.cuda(), **rules)
        assert [route.tier for route in routes] == [entry]
    expected = reference(*host, mask=mask, **rules)
    assert results[tier].is_contiguous()
    assert_as_good_as_eager(results[tier].cpu(), results["eager"].cpu(), expected)
