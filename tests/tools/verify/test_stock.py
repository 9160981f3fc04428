"""The check of stock transformers detects and names three injected faults, which are known from stock on AMD GPUs."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface
from transformers.models.llama import modeling_llama

import hf_rocm
from hf_rocm.tools.verify.check import FAILED, PASSED, Check
from tests.tools.verify import faults
from tests.tools.verify.conftest import available


def check_of(model, **arguments) -> Check:
    return hf_rocm.verify(model, force=True, quick=True, **arguments).check("stock")


@pytest.mark.parametrize(
    ("name", "dtype"),
    available(
        ("llama", torch.float32), ("qwen3", torch.bfloat16), ("gemma2", torch.bfloat16), ("gpt_oss", torch.float32)
    ),
)
def test_correct_stock_passes(name, dtype, build):
    check = check_of(build(name, dtype))
    assert check.status == PASSED and check.error <= check.allowed, check


def test_the_check_of_stock_does_not_apply_to_encoders(build):
    assert "no causal attention" in check_of(build("bert")).note


def test_a_rotary_kernel_that_uses_the_first_rows_positions_is_detected(build, monkeypatch):
    original = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", faults.rotary_of_the_first_row(original))
    check = check_of(build("llama"))
    assert check.status == FAILED and check.error > 10 * check.allowed
    assert "only with padding: rows use the positions of other rows" in check.note


def test_padded_rows_that_become_nan_are_detected(build, monkeypatch):
    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", faults.nan_without_visible_keys(original))
    model = build("llama")
    model.config._attn_implementation = "sdpa"
    check = check_of(model)
    assert check.status == FAILED and check.error != check.error
    assert "stock's results are not finite with padding" in check.note and "'sdpa'" in check.note


@pytest.mark.skipif(not available(("gpt_oss",)), reason="this release has no model with sinks")
def test_a_flash_interface_that_drops_sinks_is_detected(build):
    # In 5.0, the config of gpt_oss refuses almost all names that contain "flash".
    name = "attention_without_sinks"
    AttentionInterface.register(name, faults.attention_without_sinks)
    AttentionMaskInterface.register(name, eager_mask)
    try:
        model = build("gpt_oss")
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.fill_(1.0)
        assert check_of(model).status == PASSED
        model = build("gpt_oss")
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation_internal = name
        check = check_of(model)
    finally:
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name)
    assert check.status == FAILED and check.error > 10 * check.allowed
    assert "without padding" in check.note and name in check.note and "sinks" in check.note
