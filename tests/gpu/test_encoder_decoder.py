"""Encoder-decoder models on a GPU: recorded decoder steps return stock's tokens."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_rocm
from hf_rocm import options
from hf_rocm.generation import cache_layer, pool
from hf_rocm.generation.state import known
from tests.generation.conftest import counted
from tests.generation.test_encoder_decoder import SIZES, generate, make, make_inputs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("kind", SIZES)
def test_tokens_equal_stock(kind, padded, monkeypatch):
    monkeypatch.setattr(cache_layer, "LEAST", 16)
    monkeypatch.setattr(pool, "_AHEAD", 32)
    heads = {"d_kv": 64, "d_model": 256} if kind == "t5" else {"d_model": 256}
    stock = make(kind, **heads).to("cuda")
    with options.override(probe=False):
        prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True, graphs=True)
        for seed in (0, 1, 2):
            inputs = {name: tensor.cuda() for name, tensor in make_inputs(kind, seed=seed, padded=padded).items()}
            assert torch.equal(generate(prepared, inputs, new=40), generate(stock, inputs, new=40))
            settings = {"return_dict_in_generate": True, "output_scores": True}
            actual, expected = (
                generate(prepared, inputs, new=40, **settings),
                generate(stock, inputs, new=40, **settings),
            )
            assert torch.equal(actual.sequences, expected.sequences)
    assert counted(prepared)[1] > 3 * 39 and known(prepared).disabled is None
