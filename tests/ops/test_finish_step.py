"""The end of a decode step in PyTorch's tiers: both compute the tokens and digests, and detect infinity and NaN."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.ops.bits import sum_of_bits


@pytest.mark.parametrize("tier", ["torch", "eager", "triton"])
@pytest.mark.parametrize("further", [None, torch.tensor([-5])], ids=["alone", "further"])
@pytest.mark.parametrize("shape", [(1, 1, 256), (2, 3, 63), (1, 1, 7)], ids=str)
def test_finish_step(shape, further, tier):
    """If the requested tier can't serve the operation, such as triton on a CPU, PyTorch computes it."""
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    logits[..., 5] = logits[..., 2] = 9
    out, tokens = torch.zeros_like(logits), torch.full(shape[:2], -1)
    digests, doubt, probability = torch.arange(5), torch.zeros(()), torch.full((1,), -1.0)
    with options.override(tier=tier):
        ops.finish_step(logits, out, tokens, digests, doubt, further, probability)
    assert torch.equal(out, logits) and torch.equal(tokens, torch.full(shape[:2], 2)) and doubt == 0
    assert torch.equal(probability, logits[-1, -1].float().softmax(-1)[2:3])
    digest = sum_of_bits([logits, tokens, *([] if further is None else [further])])
    assert digests.tolist() == [1, 2, 3, 4, int(digest)]
    for value in (torch.inf, torch.nan):
        logits[-1, -1, 1] = value
        with options.override(tier=tier):
            ops.finish_step(logits, out, tokens, digests, doubt, further, probability)
        assert doubt != 0 and tokens[-1, -1] == 1
        doubt.zero_()
