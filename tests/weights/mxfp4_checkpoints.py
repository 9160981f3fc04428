"""Checkpoints of a small gpt-oss in MXFP4, rounded with numpy according to the format's specification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GptOssConfig, GptOssForCausalLM

from tests.weights import stored_checkpoints as checkpoints
from tests.weights.mxfp4_rounding import rounded

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 2, 6, 64, 96


def build(**changes: Any) -> Any:
    """A stock gpt-oss with random weights."""
    arguments = {
        "vocab_size": 96,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "max_position_embeddings": 64,
        "attn_implementation": "eager",
        "eos_token_id": None,
        "pad_token_id": 0,
        **changes,
    }
    torch.manual_seed(1)
    model = GptOssForCausalLM(GptOssConfig(**arguments)).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 * parameter.shape[-1] ** -0.5)
    return model


def write(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Write a checkpoint. Returns the stock model with the weights that the checkpoint represents."""
    model = build(**changes).to(dtype)
    model.save_pretrained(folder)

    def pack(state: dict[str, torch.Tensor]) -> None:
        parameters = dict(model.named_parameters())
        for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
            blocks, scales, exact = rounded(state.pop(name).transpose(1, 2))
            state[f"{name}_blocks"], state[f"{name}_scales"] = blocks, scales
            parameters[name].data.copy_(exact.transpose(1, 2))

    checkpoints.edit_tensors(folder, pack)
    checkpoints.edit(folder, quantization_config=CONFIG)
    return model
