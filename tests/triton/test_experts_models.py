"""Whole mixture-of-experts models with the Triton kernels, which read the selected experts in place."""

from __future__ import annotations

from copy import deepcopy
from math import gcd

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import hf_rocm
from hf_rocm import ops, options
from hf_rocm.ops.triton import experts, experts_mxfp4
from hf_rocm.ops.triton.tiles import Mxfp4Tile
from tests.parity.models import GROUPED, SHARED, tokens

KERNELS = "experts=triton,attention=eager,linear=torch,rms_norm=torch,rope=torch,act_and_mul=torch"
MODELS = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": None,
    },
}


@pytest.fixture(autouse=True)
def wide_blocks(monkeypatch):
    """Use large blocks, so that the interpreter, which is slow, runs fewer programs."""
    monkeypatch.setattr(experts, "gate_up_tile", lambda transposed: experts.ExpertsTile(32, 64, 64, 2))
    monkeypatch.setattr(
        experts, "down_tile", lambda tokens, top, transposed, rocm: experts.ExpertsTile(32, 64, 64, 2, gcd(top, 4))
    )
    tile = Mxfp4Tile(64, 4, 64, 2)
    monkeypatch.setattr(experts_mxfp4, "mxfp4_gate_up_tile", lambda *_, **__: tile)
    monkeypatch.setattr(experts_mxfp4, "mxfp4_down_tile", lambda *_, **__: tile._replace(experts=2))


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_stock(name):
    config = AutoConfig.for_model(name, **{**SHARED, **GROUPED, **MODELS[name]})
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.normal_(0, 0.15)
    hf_rocm.activate(name)
    actual = hf_rocm.prepare(deepcopy(stock), force=True)
    arguments = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with torch.no_grad(), options.override(tier=KERNELS), ops.recording() as routes:
        assert torch.equal(actual.generate(tokens(2, 5), **arguments), stock.generate(tokens(2, 5), **arguments))
    for operation in ("choose_experts", "experts"):
        served = [(route.tier, route.shapes[0][0]) for route in routes if route.operation == operation]
        assert served == [("triton", rows) for rows in (10, 2, 2, 2) for _ in range(2)]


@pytest.mark.skipif(not hasattr(transformers, "GptOssConfig"), reason="not run: needs transformers 4.55")
def test_tokens_of_an_mxfp4_checkpoint_equal_stock(tmp_path):
    from tests.weights import mxfp4_checkpoints as mxfp4

    stock, ids = mxfp4.write(tmp_path), tokens(2, 5) % 96
    actual = hf_rocm.from_pretrained(tmp_path, force=True, attn_implementation="eager")
    arguments = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    with torch.no_grad(), options.override(tier=KERNELS), ops.recording() as routes:
        assert torch.equal(actual.generate(ids, **arguments), stock.generate(ids, **arguments))
    served = [(route.tier, route.name, route.shapes[0][0]) for route in routes if route.operation == "mxfp4_experts"]
    assert served == [("triton", "chosen_experts", rows) for rows in (10, 2, 2) for _ in range(mxfp4.LAYERS)]
