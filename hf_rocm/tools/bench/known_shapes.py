"""Named shapes to measure with random weights. They are plain data, so that `--help` can list them without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_rocm.arguments import did_you_mean
from hf_rocm.errors import OptionError

_LLAMA_3 = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}


@dataclass(frozen=True)
class Shape:
    """A named shape. checkpoint: the checkpoint with this shape. inputs: `tokens` or `pixels`."""

    checkpoint: str
    config: str
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    encoder: bool = False
    inputs: str = "tokens"


SHAPES: dict[str, Shape] = {
    "small": Shape(
        "no checkpoint; for tests and machines without a GPU",
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "vocab_size": 2048,
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
        },
    ),
    "llama-1b": Shape(
        "Llama-3.2-1B",
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            **_LLAMA_3,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "tie_word_embeddings": True,
        },
    ),
    "llama-8b": Shape(
        "Llama-3.1-8B",
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            **_LLAMA_3,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    ),
    "llama-70b": Shape(
        "Llama-3.3-70B",
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            **_LLAMA_3,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
    ),
    "llama-405b": Shape(
        "Llama-3.1-405B",
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            **_LLAMA_3,
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
        },
    ),
    "mistral-7b": Shape(
        "Mistral-7B-v0.3",
        "MistralConfig",
        "MistralForCausalLM",
        {
            "vocab_size": 32768,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
            "sliding_window": None,
        },
    ),
    "qwen3-4b": Shape(
        "Qwen3-4B",
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {
            "vocab_size": 151936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-8b": Shape(
        "Qwen3-8B",
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
        },
    ),
    "gemma2-9b": Shape(
        "gemma-2-9b",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "vocab_size": 256000,
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
    ),
    "gemma3-4b": Shape(
        "the text model of gemma-3-4b",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262208,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
            "max_position_embeddings": 131072,
        },
    ),
    "qwen3-30b-a3b": Shape(
        "Qwen3-30B-A3B",
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
        },
    ),
    "qwen3-next-12": Shape(
        "Qwen3-Next-80B-A3B with 12 of its 48 layers and 64 of its 512 experts",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 64,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "max_position_embeddings": 262144,
        },
    ),
    "gpt-oss-20b": Shape(
        "gpt-oss-20b in bf16",
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
        },
    ),
    "olmoe": Shape(
        "OLMoE-1B-7B",
        "OlmoeConfig",
        "OlmoeForCausalLM",
        {
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 4096,
        },
    ),
    "bert-base": Shape("bert-base-uncased", "BertConfig", "BertModel", encoder=True),
    "siglip": Shape(
        "the vision tower of siglip-so400m-patch14-384",
        "SiglipVisionConfig",
        "SiglipVisionModel",
        {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 384,
            "patch_size": 14,
        },
        encoder=True,
        inputs="pixels",
    ),
    "vit-b": Shape("vit-base-patch16-224", "ViTConfig", "ViTModel", encoder=True, inputs="pixels"),
}


def shape(name: str) -> Shape:
    """Return the shape with this name. Raises `OptionError` on an unknown name."""
    if name not in SHAPES:
        raise OptionError(
            f"there is no shape {name!r}", facts={"known": ", ".join(SHAPES)}, hint=did_you_mean(name, SHAPES)
        )
    return SHAPES[name]
