"""The search of prompt lookup in the Triton kernel, compared with PyTorch."""

from __future__ import annotations

import pytest
import torch

from hf_rocm.ops.look_up_drafts import stock
from tests.triton.routed import routed

# The value of the kernel's output before the search.
UNSET = -7


@pytest.mark.parametrize("tokens", [1, 2, 6, 21])
@pytest.mark.parametrize("length", [1, 2, 30, 1023, 1024, 2500])
@pytest.mark.parametrize("ngram", [1, 3])
def test_look_up_drafts(ngram, length, tokens):
    generator = torch.Generator().manual_seed(length)
    results = set()
    for values in (2, 7, 3000, 2**40):
        for accepted in {0, 1, tokens // 2, tokens}:
            ids = torch.randint(0, values, (1, length), generator=generator)
            selected = torch.randint(0, values, (1, tokens), generator=generator)
            step_ids = torch.cat((ids[:, -1:], selected[:, :-1]), dim=1)
            step_ids[:, 1 + accepted :] = -1
            headers = torch.full((2, 2), UNSET)
            routed("look_up_drafts", ids, step_ids, selected, headers[0], ngram=ngram)
            stock(ids, step_ids, selected, headers[1], ngram)
            assert headers[0].tolist() == headers[1].tolist()
            assert headers[0, 0] == length + min(accepted, tokens - 1)
            results.add(bool(headers[0, 1] <= headers[0, 0]))
    assert results == {True, False} or length < 3
