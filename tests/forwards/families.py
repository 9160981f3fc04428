"""Small encoders of the families whose forwards are recorded, and random arguments for their calls."""

from __future__ import annotations

import random
from typing import Any

import torch
import transformers

TEXT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
IMAGE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 8,
}
DISTIL = {
    "vocab_size": 61,
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
MODERN = {**TEXT, "global_attn_every_n_layers": 2, "local_attention": 8, "cls_token_id": 2, "sep_token_id": 3}
MODERN = {**MODERN, "bos_token_id": 2, "eos_token_id": 3, "reference_compile": False}
CLIP_TEXT = {**TEXT, "eos_token_id": 3, "bos_token_id": 2, "projection_dim": 16}

# name: class, config class, config arguments, whether the model takes images
FAMILIES: dict[str, tuple[str, str, dict[str, Any], bool]] = {
    "bert": ("BertModel", "BertConfig", TEXT, False),
    "roberta": ("RobertaModel", "RobertaConfig", TEXT, False),
    "camembert": ("CamembertModel", "CamembertConfig", TEXT, False),
    "electra": ("ElectraModel", "ElectraConfig", TEXT, False),
    "distilbert": ("DistilBertModel", "DistilBertConfig", DISTIL, False),
    "modernbert": ("ModernBertModel", "ModernBertConfig", MODERN, False),
    "classifier": ("BertForSequenceClassification", "BertConfig", {**TEXT, "num_labels": 5}, False),
    "reranker": ("XLMRobertaForSequenceClassification", "XLMRobertaConfig", {**TEXT, "num_labels": 1}, False),
    "mpnet": ("MPNetModel", "MPNetConfig", {**TEXT, "relative_attention_num_buckets": 32}, False),
    "clip-text": ("CLIPTextModel", "CLIPTextConfig", CLIP_TEXT, False),
    "clip-vision": ("CLIPVisionModel", "CLIPVisionConfig", IMAGE, True),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", IMAGE, True),
    "vit": ("ViTForImageClassification", "ViTConfig", {**IMAGE, "num_labels": 5}, True),
    "dinov2": ("Dinov2Model", "Dinov2Config", {**IMAGE, "mlp_ratio": 2}, True),
}


def padded_families() -> list[str]:
    """The families whose calls are padded to a bucket length."""
    return [name for name, (*_, image) in FAMILIES.items() if not image and name != "clip-text"]


def make(name: str, *, task: str | None = None, **changes: Any) -> Any:
    """A stock model with weights large enough that every part affects the output.

    task: the name of another class of the family.
    """
    class_name, config_name, arguments, _ = FAMILIES[name]
    config = getattr(transformers, config_name)(**{**arguments, **changes})
    torch.manual_seed(len(name))
    model = getattr(transformers, task or class_name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def inputs(name: str, rows: int = 2, length: int = 7, seed: int = 0, padded: int | None = 0) -> dict[str, Any]:
    """The arguments of one call.

    padded: the number of padding tokens in the first row. If it is None, the call has no mask.
    """
    generator = torch.Generator().manual_seed(seed)
    if FAMILIES[name][3]:
        return {"pixel_values": torch.randn(rows, 3, 24, 24, generator=generator)}
    ids = torch.randint(4, 61, (rows, length), generator=generator)
    if padded is None:
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[0, length - padded :] = 0
    ids[0, length - padded :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def random_kind(name: str, rng: random.Random) -> dict[str, Any]:
    """A kind of call: the shapes and flags of calls that differ only in their values."""
    flags: dict[str, Any] = rng.choice(({}, {}, {"output_hidden_states": True}, {"return_dict": False}))
    rows, length = rng.choice(((1, 7), (2, 7), (2, 9)))
    masked = rng.random() < 0.8
    return {"rows": rows, "length": length, "masked": masked, "flags": flags, "positional": rng.random() < 0.3}


def random_call(name: str, kind: dict[str, Any], rng: random.Random) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of this kind, with random values and padding."""
    padded = rng.choice((0, 0, 2, 3)) if kind["masked"] else None
    arguments = inputs(name, kind["rows"], kind["length"], seed=rng.randrange(10**6), padded=padded)
    if not kind["positional"]:
        return (), {**arguments, **kind["flags"]}
    first, *rest = arguments
    return (arguments[first],), {**{key: arguments[key] for key in rest}, **kind["flags"]}
