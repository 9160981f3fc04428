"""Random calls to `generate` with real recordings return stock's tokens in fp32 and use constant memory."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import options
from hf_rocm.generation import cache_layer, pool
from tests.generation.conftest import counted
from tests.generation.soak import CHANGES, DECODERS, FAMILIES, Soak

pytestmark = [
    pytest.mark.gpu,
    # PyTorch warns about its first graph.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]

DECODER = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 503}
SIZES = {name: DECODER for name in DECODERS}
SIZES["deepseek_v3"] = {
    **DECODER,
    "head_dim": 32,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
}
# with tied weights, Gemma 2 and Gemma 3 repeat the last token whatever their attention returns
SIZES |= {name: {**DECODER, "tie_word_embeddings": False} for name in ("gemma2", "gemma3")}
# T5 does not scale its attention scores: with larger weights, a change of 2e-7 in the weights changes stock's tokens
SIZES |= {name: {"d_model": 256, "d_kv": 64, "scale": 0.35} for name in ("t5", "mt5")}


@pytest.fixture
def short_buffers(monkeypatch):
    """Windows move and buffers grow after a few tokens."""
    monkeypatch.setattr(cache_layer, "SLACK", 5)
    monkeypatch.setattr(cache_layer, "LEAST", 16)
    monkeypatch.setattr(pool, "_AHEAD", 32)
    # First-use checks take seconds, and other tests cover them.
    with options.override(probe=False):
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_random_calls_return_stock_tokens(family, short_buffers):
    soak = Soak(family, device="cuda", **SIZES.get(family, {"d_model": 256}))
    assert soak.differing(range(60)) == []
    soak.assert_recorded(60)
    assert soak.differing_in_threads(range(60), limit=32) == []
    for change in CHANGES:
        assert soak.differing_after(change, range(4)) == []
    soak.assert_recorded(92)


def test_memory_does_not_grow(short_buffers):
    soak = Soak("llama", device="cuda", **DECODER)
    # PyTorch allocates blocks of at least 512 bytes, so a leak of one block per call is detected
    assert soak.grown(1000, torch.cuda.memory_allocated) < 2**18
    assert counted(soak.prepared)[1] > 1000
