"""Models with random weights, for verification without a checkpoint: from any config, or from a small named config."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_rocm.errors import OptionError
from hf_rocm.tools.verify.wide_reference import cast

_SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2, "head_dim": 64}
_SLIDING = {**_GROUPED, "sliding_window": 24}

# name → (model type, arguments of its config). The kernels support these head dims. Sliding windows are shorter than
# the prompts that are verified.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-bert": ("bert", _SMALL),
    "tiny-gemma2": ("gemma2", {**_SLIDING, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 5.0}),
    "tiny-gpt-oss": ("gpt_oss", {**_SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "tiny-llama": ("llama", _GROUPED),
    "tiny-mistral": ("mistral", _SLIDING),
    "tiny-qwen3": ("qwen3", _GROUPED),
}


def random_model(config: str, *, dtype: str, device: torch.device) -> Any:
    """Create a model from a config, with the same random weights on every machine.

    config: a name in `SHAPES`, a config.json, or a folder with one. dtype: the name of a dtype in torch.
    Raises `OptionError` if torch has no such floating-point dtype, if the config can't be read, or if this release of
    transformers does not have the config's model type.
    """
    import transformers

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise OptionError(f"there is no dtype {dtype!r}", hint="use one such as bfloat16, float16 or float32")
    settings = _config(config)
    if type(settings) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and settings.model_type not in ("bert", "roberta"):
        loader: Any = transformers.AutoModelForCausalLM
    elif type(settings) in transformers.MODEL_FOR_MASKED_LM_MAPPING:
        loader = transformers.AutoModelForMaskedLM
    else:
        loader = transformers.AutoModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = loader.from_config(settings)
        _fill(model)
    cast(model, kind)
    return model.to(device).eval()


def _config(config: str) -> Any:
    import transformers

    if config in SHAPES:
        model_type, arguments = SHAPES[config]
        if model_type not in transformers.CONFIG_MAPPING:
            raise OptionError(f"transformers {transformers.__version__} has no {model_type}")
        return transformers.AutoConfig.for_model(model_type, **arguments)
    path = Path(config)
    near = difflib.get_close_matches(config, SHAPES, 1, 0.8)
    if near and not path.exists():
        raise OptionError(f"there is no config {config!r}", hint=f"did you mean {near[0]}?")
    try:
        return transformers.AutoConfig.from_pretrained(path.parent if path.name == "config.json" else path)
    except (OSError, ValueError) as error:
        raise OptionError(
            f"no config could be read from {config!r}",
            facts={"transformers error": " ".join(str(error).split())},
            hint=f"pass a config.json, a folder with one, or one of {', '.join(sorted(SHAPES))}",
        ) from error


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Fill in weights that preserve the norm of activations, so that all parts of the model affect its output."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for parameter in model.parameters():
        if id(parameter) in embeddings:
            parameter.normal_(0, 0.5)
        elif parameter.ndim == 1:
            # Norms and biases vary around their initial values.
            parameter.add_(torch.randn_like(parameter) * 0.2)
        else:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
