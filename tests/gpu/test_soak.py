"""Random calls of `generate` with real recordings return stock's tokens in fp32 and use constant memory."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_rocm
from hf_rocm import options
from hf_rocm.generation import cache_layer, pool
from tests.generation.conftest import counted, make
from tests.generation.soak import same_tokens

pytestmark = [
    pytest.mark.gpu,
    # if a call requests a static cache, stock compiles the model, and the compiler warns
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings(
        "ignore:(TensorFloat32 tensor cores|The CUDA Graph is empty|\\s*Online softmax):UserWarning"
    ),
]

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 503}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "gemma3"])
def test_random_calls(kind, monkeypatch):
    monkeypatch.setattr(cache_layer, "SLACK", 5)
    monkeypatch.setattr(cache_layer, "LEAST", 16)
    monkeypatch.setattr(pool, "_AHEAD", 32)
    stock = make(kind, **SIZES).to("cuda")
    with options.override(probe=False):
        prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True, graphs=True)
        assert same_tokens(prepared, stock, range(20), device="cuda") == []
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        assert same_tokens(prepared, stock, range(40), device="cuda") == []
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 32 * 2**20
    assert counted(prepared)[1] > 200
