"""Rounds of an assistant without a call to `generate`, with real recordings, draft as in stock transformers."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_rocm
from hf_rocm import options
from hf_rocm.generation.state import known
from tests.generation.conftest import assistant_of, counted, make
from tests.generation.test_drafting import Drafts, assisted, drafted_by_stock
from tests.generation.test_speculation import repeating

pytestmark = [
    pytest.mark.gpu,
    # PyTorch warns about its first graph.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 503}
CALLS = 16


@pytest.mark.parametrize("threshold", [0.0, 0.02])
@pytest.mark.parametrize("schedule", ["constant", "heuristic"])
def test_tokens_and_drafts_equal_stock(schedule, threshold, monkeypatch):
    drafts = Drafts(monkeypatch)
    stock = make("llama", **SIZES).cuda()
    stock.generation_config.eos_token_id, stock.generation_config.pad_token_id = None, None
    assistant = assistant_of(stock, schedule, noise=0.01)
    assistant.generation_config.assistant_confidence_threshold = threshold
    with options.override(probe=False):
        pair = [hf_rocm.prepare(copy.deepcopy(model), force=True, graphs=True) for model in (stock, assistant)]
        calls = [{name: value.cuda() for name, value in repeating(seed % 3).items()} for seed in range(CALLS)]
        tokens = [assisted(pair, inputs) for inputs in calls]
        expected, expected_drafts = drafted_by_stock((stock, assistant), calls)
    assert all(map(torch.equal, tokens, expected)) and drafts.all == expected_drafts
    assert len(drafts.skipped) > 4 * CALLS
    for model in pair:
        assert counted(model)[1] > 0 and known(model).turned_away == {} and known(model).disabled is None
