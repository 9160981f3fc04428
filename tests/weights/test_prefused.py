"""Checkpoints that store q, k and v, or gate and up, as one matrix are recognised, reported and left unchanged."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import hf_rocm
from hf_rocm.loading import prepare as preparing
from hf_rocm.weights.prefused import fused_in_checkpoint
from tests.weights.models import IDS, logits

SHAPE = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}


@pytest.fixture
def phi3(tmp_path):
    torch.manual_seed(0)
    config = transformers.Phi3Config(
        **SHAPE, intermediate_size=80, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2
    )
    transformers.Phi3ForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def joined(model):
    return {path: names for path, module in model.named_modules() if (names := fused_in_checkpoint(module))}


def test_phi3_is_reported_and_equals_stock(phi3):
    prepared = hf_rocm.from_pretrained(phi3, force=True).eval()
    report = prepared.__dict__[preparing.REPORT]
    assert joined(prepared) == {
        "model.layers.0.self_attn": ["qkv_proj"],
        "model.layers.0.mlp": ["gate_up_proj"],
        "model.layers.1.self_attn": ["qkv_proj"],
        "model.layers.1.mlp": ["gate_up_proj"],
    }
    assert not report["fused"] and not report["skipped"]
    assert "one matrix in the checkpoint already: qkv_proj" in hf_rocm.explain(prepared).details()
    stock = transformers.Phi3ForCausalLM.from_pretrained(phi3).eval()
    assert type(prepared.model.layers[0].mlp.gate_up_proj) is nn.Linear
    torch.testing.assert_close(logits(prepared), logits(stock))
    hf_rocm.restore(prepared)
    assert torch.equal(logits(prepared), logits(stock))


def test_gpt2s_conv1d_is_recognised_too(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=4, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    prepared = hf_rocm.from_pretrained(tmp_path, force=True).eval()
    assert joined(prepared) == {"transformer.h.0.attn": ["c_attn"]}
    stock = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(prepared(IDS).logits, stock(IDS).logits)


def test_only_linear_layers_with_known_names_are_recognised():
    module = nn.Module()
    module.qkv_proj, module.o_proj, module.Wqkv = nn.Linear(4, 12), nn.Linear(4, 4), nn.Identity()
    assert fused_in_checkpoint(module) == ["qkv_proj"]
    assert fused_in_checkpoint(nn.Linear(4, 4)) == []
