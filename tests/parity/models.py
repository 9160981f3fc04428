"""Small models of four types, saved as checkpoints, and helpers that load and check them."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_rocm
from hf_rocm import ops
from hf_rocm.layers.fallback_reasons import noted
from hf_rocm.ops.pointwise import eager_rms_norm
from hf_rocm.overlay import bind

SHARED: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 24}
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SHARED, **GROUPED, "head_dim": 16}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**SHARED, **GROUPED}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**SHARED, **GROUPED, "num_key_value_heads": 1}),
    "bert": ("BertForMaskedLM", "BertConfig", SHARED),
}
DECODERS = ("llama", "qwen3", "gemma")
ATTENTION = {"llama": "LlamaAttention", "qwen3": "Qwen3Attention", "gemma": "GemmaAttention"}


def bert_attention() -> str:
    """The name of the class that BERT builds for sdpa. Up to 4.57, a table selects a subclass."""
    return "BertSdpaSelfAttention" if transformers.__version__.startswith("4.") else "BertSelfAttention"


def save_checkpoint(name: str, folder: Path, dtype: torch.dtype) -> Path:
    """Save a model of this type, with weights so large that every part affects the output. Returns the folder."""
    class_name, config_name, arguments = MODELS[name]
    config = getattr(transformers, config_name)(**arguments)
    torch.manual_seed(len(name))
    model = getattr(transformers, class_name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases: keep the mean and add noise.
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(0, 0.15)
    model.tie_weights()
    model.to(dtype).save_pretrained(folder)
    return folder


def load_stock(name: str, folder: Path, **arguments: Any) -> Any:
    """The stock model in the checkpoint's dtype."""
    model = getattr(transformers, MODELS[name][0]).from_pretrained(folder, torch_dtype="auto", **arguments)
    return model.eval()


def in_float64(model: Any) -> Any:
    """Convert the model to float64, including its RMSNorms, which stock always computes in float32."""
    for module in model.double().modules():
        if type(module).__name__.endswith("RMSNorm"):
            one_plus = not hasattr(module, "variance_epsilon")
            epsilon = module.eps if one_plus else module.variance_epsilon
            module.forward = partial(eager_rms_norm, weight=module.weight, eps=epsilon, one_plus=one_plus)
    return model


def load_prepared(folder: Path, **arguments: Any) -> Any:
    """The model loaded by hf_rocm with force=True."""
    return hf_rocm.from_pretrained(folder, force=True, **arguments).eval()


def static_cache(model: Any, batch: int, length: int) -> Any:
    """Build a static cache with the arguments that this release's class requires."""
    parameters = inspect.signature(transformers.StaticCache.__init__).parameters
    arguments = {
        "config": model.config,
        "max_batch_size": batch,
        "max_cache_len": length,
        "device": model.device,
        "dtype": model.dtype,
    }
    return transformers.StaticCache(**{key: value for key, value in arguments.items() if key in parameters})


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 131, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_served(name: str, model: Any, routes: list[ops.registry.Route], calls: int) -> None:
    """Assert that hf_rocm's attention ran in every layer of every call, and that keys and values were not expanded."""
    config = model.config
    attended = [route for route in routes if route.operation == "attention"]
    assert len(attended) == config.num_hidden_layers * calls
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    for route in attended:
        query, key, value = route.shapes
        assert query[1] == config.num_attention_heads and key[1] == value[1] == kv_heads
    expected = ATTENTION.get(name) or bert_attention()
    modules = [module for module in model.modules() if type(module).__name__ == expected]
    assert len(modules) == config.num_hidden_layers
    for module in modules:
        assert bind.mode_of(module) == bind.ON and noted(module) is None


def assert_fused_gemms_ran(model: Any, routes: list[ops.registry.Route]) -> None:
    """Assert that the routes include GEMMs with fused weights: q, k and v, and in decoders gate and up."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    weights = [route.shapes[1] for route in routes if route.operation in ("linear", "fused_linear")]
    assert ((config.num_attention_heads + 2 * kv_heads) * head_dim, config.hidden_size) in weights
    if hasattr(config, "num_key_value_heads"):
        assert (2 * config.intermediate_size, config.hidden_size) in weights
