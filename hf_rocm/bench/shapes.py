"""Models of known shapes with random weights: what is measured where there is no checkpoint.

Speed doesn't depend on what the weights say (a mixture's routing excepted: random weights spread tokens evenly).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_rocm.errors import OptionError

_LLAMA_3 = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}


@dataclass(frozen=True)
class Shape:
    """One named shape. of: the checkpoint that has it. inputs: what the model eats, `tokens` or `pixels`."""

    of: str
    config: str
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    encoder: bool = False
    inputs: str = "tokens"


SHAPES: dict[str, Shape] = {
    "small": Shape(
        "nothing; for tests and machines without a GPU",
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
    "bert-base": Shape("bert-base-uncased", "BertConfig", "BertModel", encoder=True),
    "siglip": Shape(
        "siglip-so400m-patch14-384, its vision tower",
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
}


def shape(name: str) -> Shape:
    """The shape of that name, or an `OptionError`."""
    if name not in SHAPES:
        raise OptionError(f"there is no shape {name!r}", facts={"known": ", ".join(SHAPES)})
    return SHAPES[name]


def build(name: str, *, device: torch.device, dtype: torch.dtype, layers: int | None = None) -> Any:
    """A model of that shape, made on the device in its dtype at once, stock and in eval mode.

    layers: fewer (or more) layers than the shape has. Raises `OptionError` where this transformers lacks the model.
    """
    cls, config = architecture(name, layers=layers)
    with default_dtype(dtype), torch.device(device):
        model = cls(config).eval()
    _fill(model)
    return model


def architecture(name: str, *, layers: int | None = None, **settings: Any) -> tuple[Any, Any]:
    """The model's class and a config of that shape. settings: of the config, instead of the shape's own.

    Raises `OptionError` where this transformers lacks the model.
    """
    import transformers

    named = shape(name)
    cls, config_cls = getattr(transformers, named.model, None), getattr(transformers, named.config, None)
    if cls is None or config_cls is None:
        raise OptionError(f"transformers {transformers.__version__} has no {named.model}", hint="name another --config")
    depth = {} if layers is None else {"num_hidden_layers": layers}
    return cls, config_cls(**{**named.settings, **depth, **settings})


def _fill(model: torch.nn.Module) -> None:
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, deviation(parameter.shape[-1]), generator=generator)


def deviation(inputs: int) -> float:
    """Of weights whose products keep the size of what goes in, so that no depth over- or underflows."""
    return 1 / math.sqrt(inputs)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
